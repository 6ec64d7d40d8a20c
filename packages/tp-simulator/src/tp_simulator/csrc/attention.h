// Fused attention, for which torch asks other devices than its own under a name of its own.
//
// It is the CPU's, which keeps no scores: memory grows with the tokens, as on cards.
#pragma once
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

#include "kernels.h"

namespace sim {

using MaybeTensor = std::optional<Tensor>;

// No card has a fused kernel for doubles; and torch 2.11's meta kernel has their sums as floats.
inline bool is_type_for_fused(const Tensor& query) {
  return query.is_floating_point() && query.scalar_type() != at::kDouble;
}

inline bool is_mask_for_fused(const MaybeTensor& mask) {
  if (!mask.has_value() || !mask->defined()) return true;
  return !mask->requires_grad() && (mask->dim() == 2 || mask->dim() == 4);
}

// What torch's function runs: the fused kernel where it can, or products with all scores between them.
inline int64_t attention_backend(
    const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask, double dropout, bool,
    std::optional<double>, bool) {
  auto& context = at::globalContext();
  bool is_fused = context.userEnabledOverrideableSDP() && dropout == 0 && query.dim() == 4 && key.dim() == 4 &&
      is_type_for_fused(query) && query.sym_size(-1) == value.sym_size(-1) && query.sym_numel() > 0 &&
      key.sym_numel() > 0 && is_mask_for_fused(mask);
  // The CPU's kernel reads features that lie apart in memory as if they did not.
  for (auto* tensor : {&query, &key, &value}) is_fused = is_fused && tensor->sym_stride(-1) == 1;
  if (is_fused) return int64_t(at::SDPBackend::overrideable);
  TORCH_CHECK(context.userEnabledMathSDP(), "sim: the backends that are enabled cannot do this attention");
  return int64_t(at::SDPBackend::math);
}

using FusedAttention =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

inline FusedAttention fused_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& bias, double dropout, bool is_causal,
    bool, std::optional<double> scale) {
  TORCH_CHECK_NOT_IMPLEMENTED(dropout == 0, "sim: no dropout in fused attention");
  TORCH_CHECK_NOT_IMPLEMENTED(is_type_for_fused(query), "sim: no fused attention in ", query.scalar_type());
  Stack stack{query, key, value, dropout, is_causal, bias, scale};
  run_kernel(operator_named("aten::_scaled_dot_product_flash_attention_for_cpu"), &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), Tensor(), Tensor(), query.sym_size(2), key.sym_size(2),
          Tensor(), Tensor(), Tensor()};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> fused_attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    std::array<bool, 4>, const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
    double dropout, bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  MaybeTensor mask;
  if (bias.defined()) mask = bias;
  Stack stack{grad, query, key, value, out, sums, dropout, is_causal, mask, scale};
  run_kernel(operator_named("aten::_scaled_dot_product_flash_attention_for_cpu_backward"), &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(), Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", fused_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", fused_attention_backward);
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::attention_backend)
}  // namespace at::native
