// Cells of LSTM and GRU layers, which torch asks for in one piece on every device but the CPU.
//
// Made of other operations here, as in torch.nn.LSTMCell's and torch.nn.GRUCell's documents.
#pragma once
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include "kernels.h"

namespace sim {

using OptionalTensor = std::optional<Tensor>;

inline bool is_given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

inline Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return is_given(bias) ? gates + *bias : gates;
}

inline std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto gates = with_bias(with_bias(input_gates + hidden_gates, input_bias), hidden_bias).chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

inline std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  if (!is_given(grad_hy) && !is_given(grad_cy)) return {};
  auto gates = workspace.chunk(4, 1);
  auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  auto output = cy.tanh();
  auto of_hy = is_given(grad_hy) ? *grad_hy : at::zeros_like(cy);
  auto of_cy = of_hy * out * (1 - output * output);
  if (is_given(grad_cy)) of_cy = of_cy + *grad_cy;
  auto grad_gates = at::cat(
      {of_cy * cell * in * (1 - in), of_cy * cx * forget * (1 - forget), of_cy * in * (1 - cell * cell),
       of_hy * output * out * (1 - out)},
      1);
  return {grad_gates, of_cy * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

inline std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto input = with_bias(input_gates, input_bias).chunk(3, 1);
  auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = (input[0] + hidden[0]).sigmoid(), update = (input[1] + hidden[1]).sigmoid();
  auto next = (input[2] + reset * hidden[2]).tanh();
  return {next + update * (hx - next), at::cat({reset, update, next, hx, hidden[2]}, 1)};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  auto saved = workspace.chunk(5, 1);
  auto &reset = saved[0], &update = saved[1], &next = saved[2], &hx = saved[3], &hidden = saved[4];
  auto of_update = grad_hy * (hx - next) * update * (1 - update);
  auto of_next = grad_hy * (1 - update) * (1 - next * next);
  auto of_reset = of_next * hidden * reset * (1 - reset);
  auto grad_input = at::cat({of_reset, of_update, of_next}, 1);
  auto grad_hidden = at::cat({of_reset, of_update, of_next * reset}, 1);
  auto input_bias = has_bias ? grad_input.sum(0) : Tensor();
  auto hidden_bias = has_bias ? grad_hidden.sum(0) : Tensor();
  return {grad_input, grad_hidden, grad_hy * update, input_bias, hidden_bias};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace sim
