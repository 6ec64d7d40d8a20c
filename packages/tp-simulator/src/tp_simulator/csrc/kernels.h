// Kernels: every operation that torch has for the CPU, launched on a stream and run there by the CPU's kernel.
//
// What a launch returns has to have a shape before the kernel runs. torch's meta kernels say it. Where there is none,
// or where the shape depends on values (`nonzero`), the stream's work is done first and the kernel runs at once; in
// the second case a card's host waits, too.
#pragma once
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>

#include <unordered_map>

#include "copies.h"
#include "generators.h"

namespace sim {

using c10::IValue;
using torch::jit::Stack;

// Operations that take tensors of the CPU beside those of a device, on cards too.
inline bool takes_host_tensors(const std::string& name) {
  static const std::set<std::string> names{
      "aten::index",          "aten::index_put",        "aten::index_put_",           "aten::_index_put_impl_",
      "aten::_unsafe_index",  "aten::_unsafe_index_put", "aten::_pack_padded_sequence"};
  return names.count(name) > 0;
}

// Operations whose meta kernel and CPU kernel return other shapes, or whose CPU kernel resizes its target in between.
inline bool has_shapes_of_its_own(const std::string& name) {
  static const std::set<std::string> names{
      "aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::native_batch_norm",
      "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_no_training",
      "aten::_batch_norm_with_update", "aten::_batch_norm_no_update", "aten::smooth_l1_loss", "aten::mse_loss"};
  return names.count(name) > 0;
}

// Calls a kernel, which puts its results in the place of its arguments. These outlive the call: of a kernel with
// several targets torch 2.11 drops the arguments first, and then takes its results, which are references to them.
inline void call(const c10::OperatorHandle& op, Stack& stack) {
  Stack arguments = stack;
  op.callBoxed(&stack);
}

// Applies a function to each tensor of a value, and puts devices in the place of this one's.
template <class Function>
IValue mapped(const IValue& value, c10::DeviceType device, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isDevice()) return c10::Device(device);
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& tensor : value.toTensorVector()) all.push_back(function(tensor));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      all.push_back(tensor.has_value() ? std::optional<Tensor>(function(*tensor)) : std::nullopt);
    return all;
  }
  return value;
}

template <class Function>
void each_tensor(const IValue& value, Function function) {
  mapped(value, at::kCPU, [&](const Tensor& tensor) {
    if (tensor.defined()) function(tensor);
    return tensor;
  });
}

inline Tensor as_meta(const Tensor& tensor) {
  auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// Memory of the current device for a result of this shape.
inline Tensor empty_for(const Tensor& result) {
  TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == at::kStrided, "sim: no tensors of layout ", result.layout());
  auto device = c10::Device(TYPE, current_device);
  if (result.is_non_overlapping_and_dense())
    return empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, device, {});
  return empty(result.sizes(), result.scalar_type(), {}, device, {}, {});
}

// What a meta kernel said of a call: what it returns, and the sizes of what it writes to. Most of them are written in
// Python, and take a hundred times as long as a small kernel. A program makes the same calls in every step.
struct Form {
  std::optional<Stack> results;  // nothing where the meta kernel cannot know
  std::vector<std::vector<int64_t>> written;
};
inline auto& forms = *new std::unordered_map<std::string, Form>;
inline auto& forms_lock = *new std::mutex;  // held briefly, and nothing is called meanwhile
constexpr size_t MOST_FORMS = 100'000;

// All that the answer of a meta kernel depends on, as bytes.
class FormKey {
 public:
  explicit FormKey(const c10::FunctionSchema& schema) {
    add(reinterpret_cast<intptr_t>(&schema));  // of an operation as long as the process lives
    add(int64_t(c10::typeMetaToScalarType(c10::get_default_dtype())));
    add(at::globalContext().deterministicAlgorithms());
  }

  void add(const IValue& value) {
    add(int64_t(value.isTensor() ? 't' : value.isList() ? 'l' : value.isDouble() ? 'd' : value.isNone() ? 'n' : 'v'));
    if (value.isTensor()) return add(value.toTensor());
    if (value.isList()) {
      auto values = value.toListRef();
      add(int64_t(values.size()));
      for (auto& each : values) add(each);
    } else if (value.isInt() || value.isBool()) {
      add(value.isInt() ? value.toInt() : int64_t(value.toBool()));
    } else if (value.isDouble()) {
      auto number = value.toDouble();
      bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
    } else if (value.isString()) {
      add(int64_t(value.toStringRef().size()));
      bytes_ += value.toStringRef();
    } else if (!value.isNone() && !value.isDevice() && !value.isGenerator()) {
      is_whole_ = false;
    }
  }

  // Empty where something cannot be said in bytes.
  std::string bytes() && { return is_whole_ ? std::move(bytes_) : std::string(); }

 private:
  void add(int64_t number) { bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number)); }

  void add(const Tensor& tensor) {
    add(int64_t(tensor.defined()));
    if (!tensor.defined()) return;
    bool is_here = is_on_device(tensor);
    // A meta kernel may look at the values of a tensor of the host.
    is_whole_ = is_whole_ && (is_here || tensor.dim() == 0);
    add(int64_t(is_here));
    add(int64_t(tensor.scalar_type()));
    add(int64_t(tensor.unsafeGetTensorImpl()->is_wrapped_number()));
    add(int64_t(tensor.dim()));
    for (auto numbers : {tensor.sizes(), tensor.strides()})
      bytes_.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t));
  }

  std::string bytes_;
  bool is_whole_ = true;
};

// One call of an operation on tensors of a device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const Stack& stack)
      : op_(op), schema_(op.schema()), arguments_(stack.end() - op.schema().arguments().size(), stack.end()) {
    device_ = -1;
    std::optional<c10::Device> other;
    for (size_t i = 0; i < arguments_.size(); i++) {
      each_tensor(arguments_[i], [&](const Tensor& tensor) {
        if (is_on_device(tensor)) {
          if (device_ < 0) device_ = tensor.device().index();
          if (tensor.device().index() != device_) other = tensor.device();
        } else if (tensor.dim() > 0 && !takes_host_tensors(schema_.name())) {
          other = tensor.device();
        }
      });
      if (arguments_[i].isDevice() && device_ < 0 && arguments_[i].toDevice().type() == TYPE)
        device_ = device_index(arguments_[i].toDevice().index());
    }
    if (device_ < 0) device_ = current_device;
    TORCH_CHECK(
        !other.has_value(), "Expected all tensors to be on the same device, but found at least two devices, sim:",
        device_, " and ", other.value_or(c10::Device(at::kCPU)), "! (in ", schema_.name(), ")");
    for (auto& returned : schema_.returns())
      TORCH_CHECK_NOT_IMPLEMENTED(
          !returned.alias_info() || returned.alias_info()->isWrite(), "sim: no view by ", schema_.name());
  }

  // Runs the call, and returns its results.
  Stack operator()() {
    check_usable(device_);
    c10::DeviceGuard guard(c10::Device(TYPE, device_));
    count("kernels");
    take_generator();
    auto results = shapes();
    return results.has_value() ? later(*results) : now();
  }

 private:
  bool writes(size_t argument) const {
    auto* alias = schema_.arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }

  // The generator of the CPU from which the kernel draws, if it draws.
  void take_generator() {
    for (size_t i = 0; i < arguments_.size(); i++) {
      if (schema_.arguments()[i].name() != "generator") continue;
      at::Generator drawn = default_generator(device_);
      if (arguments_[i].isGenerator() && arguments_[i].toGenerator().defined()) drawn = arguments_[i].toGenerator();
      TORCH_CHECK(
          drawn.device().type() == TYPE, "Expected a 'sim' device type for generator but found '",
          drawn.device().type(), "'");
      generator_ = static_cast<Generator*>(drawn.unsafeGetGeneratorImpl())->next();
      return;
    }
    // The fused attention draws for dropout alone, and is called without.
    bool draws = op_.hasTag(at::Tag::nondeterministic_seeded) &&
        schema_.name() != "aten::_scaled_dot_product_flash_attention_for_cpu";
    TORCH_CHECK_NOT_IMPLEMENTED(!draws, "sim: ", schema_.name(), " draws random numbers, and takes no generator");
  }

  // The arguments for another kernel than this device's.
  template <class Function>
  Stack arguments_for(c10::DeviceType device, Function function) const {
    Stack all;
    for (size_t i = 0; i < arguments_.size(); i++) {
      if (generator_.defined() && schema_.arguments()[i].name() == "generator") {
        all.push_back(device == at::kCPU ? IValue(generator_) : IValue());
        continue;
      }
      all.push_back(mapped(arguments_[i], device, [&](const Tensor& tensor) {
        if (is_on_device(tensor)) return function(tensor, writes(i));
        return device == at::kCPU ? snapshot(tensor) : tensor;
      }));
    }
    return all;
  }

  // What the meta kernel says the call returns; nothing where it cannot know.
  std::optional<Stack> shapes() {
    bool is_plain = op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta) && !has_shapes_of_its_own(schema_.name());
    for (auto& returned : schema_.returns()) {
      auto kind = returned.type()->kind();
      bool is_tensors = kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
      host_learns_ = host_learns_ || !is_tensors;
    }
    host_learns_ = host_learns_ || op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output);
    if (!is_plain || host_learns_) return {};
    auto form = known_form();
    if (!form.results.has_value()) {
      // As for a mask among indices; what is an error is one for the CPU's kernel, too. Where the caller brings the
      // target, the shape was known, and nobody waits for it.
      host_learns_ = !brings_target();
      return {};
    }
    auto sizes = form.written.begin();
    each_written([&](const Tensor& tensor) {
      if (tensor.sizes() != c10::IntArrayRef(*sizes)) resize_(tensor, *sizes, {});
      ++sizes;
    });
    return form.results;
  }

  template <class Function>
  void each_written(Function function) const {
    for (size_t i = 0; i < arguments_.size(); i++) {
      if (!writes(i)) continue;
      each_tensor(arguments_[i], [&](const Tensor& tensor) {
        if (is_on_device(tensor)) function(tensor);
      });
    }
  }

  // What the meta kernel says, which is asked once about calls of one form.
  Form known_form() const {
    FormKey key(schema_);
    for (auto& argument : arguments_) key.add(argument);
    auto bytes = std::move(key).bytes();
    if (!bytes.empty()) {
      std::lock_guard<std::mutex> held(forms_lock);
      auto found = forms.find(bytes);
      if (found != forms.end()) return found->second;
    }
    auto form = ask_meta_kernel();
    if (!bytes.empty()) {
      std::lock_guard<std::mutex> held(forms_lock);
      if (forms.size() >= MOST_FORMS) forms.clear();
      forms.emplace(std::move(bytes), form);
    }
    return form;
  }

  Form ask_meta_kernel() const {
    Isolated isolated;
    std::vector<Tensor> written;
    auto stack = arguments_for(at::kMeta, [&](const Tensor& tensor, bool is_written) {
      auto meta = as_meta(tensor);
      if (is_written) written.push_back(meta);
      return meta;
    });
    try {
      call(op_, stack);
    } catch (const std::exception&) {
      return {};
    }
    Form form{stack, {}};
    for (auto& meta : written) form.written.push_back(meta.sizes().vec());
    return form;
  }

  // The argument that a result is, as for `add_`; nothing for a new tensor.
  std::optional<size_t> argument_of(size_t result) const {
    auto* alias = schema_.returns()[result].alias_info();
    if (!alias) return {};
    for (size_t i = 0; i < arguments_.size(); i++) {
      auto* other = schema_.arguments()[i].alias_info();
      if (other && *other == *alias) return i;
    }
    return {};
  }

  bool brings_target() const {
    for (auto& argument : schema_.arguments())
      if (argument.is_out()) return true;
    return false;
  }

  std::vector<Use> uses() const {
    std::vector<Use> all;
    for (size_t i = 0; i < arguments_.size(); i++)
      each_tensor(arguments_[i], [&](const Tensor& tensor) { add_use(all, tensor, writes(i)); });
    return all;
  }

  // Has the kernel run at its place in the stream, into memory of the shapes that are known.
  Stack later(const Stack& shapes) {
    auto entered = uses();
    Stack results, targets;
    for (size_t i = 0; i < shapes.size(); i++) {
      if (auto argument = argument_of(i)) {
        results.push_back(arguments_[*argument]);
        targets.emplace_back();
        continue;
      }
      results.push_back(mapped(shapes[i], TYPE, [&](const Tensor& shape) {
        return shape.defined() ? empty_for(shape) : shape;
      }));
      each_tensor(results.back(), [&](const Tensor& tensor) { add_use(entered, tensor, true); });
      targets.push_back(mapped(results.back(), at::kCPU, [&](const Tensor& tensor) {
        return tensor.defined() ? on_host(tensor) : tensor;
      }));
    }
    auto stack = arguments_for(at::kCPU, [](const Tensor& tensor, bool) { return on_host(tensor); });
    auto& stream = current_stream(device_);
    enter(stream, launch_time(stream), schema_.name(), std::move(entered));
    launch(stream, [op = op_, stack, targets, dies = is_last_kernel()]() mutable {
      TORCH_CHECK(!dies, "it was to die at this kernel, ", op.schema().name());
      call(op, stack);
      for (size_t i = 0; i < targets.size(); i++) write(targets[i], stack[i], op.schema().name());
    });
    return results;
  }

  // Runs the kernel at once, and puts what it returns into new memory.
  Stack now() {
    auto& stream = current_stream(device_);
    run_all(stream);
    if (is_last_kernel()) die(device_, "it was to die at this kernel, " + schema_.name());
    check_usable(device_);
    Clock known = clock_of(stream);
    auto entered = uses();
    bool resizes_target = schema_.name() == "aten::smooth_l1_loss" || schema_.name() == "aten::mse_loss";
    std::vector<std::pair<Tensor, Tensor>> written;
    auto stack = arguments_for(at::kCPU, [&](const Tensor& tensor, bool is_written) {
      auto host = on_host(tensor);
      if (is_written) {
        // An empty target is resized without a warning of torch's, and more than once.
        host = resizes_target ? at::empty({0}, host.options()) : host.clone();
        written.emplace_back(tensor, host);
      }
      return host;
    });
    {
      Isolated isolated;
      call(op_, stack);
    }
    Stack results;
    for (size_t i = 0; i < stack.size(); i++) {
      if (auto argument = argument_of(i)) {
        results.push_back(arguments_[*argument]);
        continue;
      }
      results.push_back(mapped(stack[i], TYPE, [&](const Tensor& host) {
        if (!host.defined()) return host;
        auto tensor = empty_for(host);
        written.emplace_back(tensor, host);
        return tensor;
      }));
    }
    std::vector<std::pair<Tensor, Tensor>> copied;
    for (auto& [tensor, host] : written) {
      if (tensor.sizes() != host.sizes()) resize_(tensor, host.sizes(), {});
      add_use(entered, tensor, true);
      copied.emplace_back(on_host(tensor), host);
    }
    enter(stream, launch_time(stream), schema_.name(), std::move(entered));
    launch(stream, [copied]() mutable {
      for (auto& [target, source] : copied) target.copy_(source);
    });
    if (host_learns_) {
      count("synchronizations");
      Held held(data);
      host.merge(known);
    }
    return results;
  }

  // A kernel gets the value that a tensor of the host has at the launch.
  static Tensor snapshot(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    auto copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  static void write(IValue& target, const IValue& result, const std::string& name) {
    auto copy = [&](const Tensor& to, const Tensor& from) {
      if (!to.defined() || !from.defined()) return;
      TORCH_INTERNAL_ASSERT(
          to.sizes() == from.sizes(), name, " returned ", from.sizes(), " where its meta kernel says ", to.sizes());
      to.copy_(from);
    };
    if (target.isTensor()) copy(target.toTensor(), result.toTensor());
    if (target.isTensorList()) {
      auto to = target.toTensorVector();
      auto from = result.toTensorVector();
      for (size_t i = 0; i < to.size(); i++) copy(to[i], from[i]);
    }
  }

  bool is_last_kernel() {
    Held held(data);
    auto& left = devices[device_].kernels_left;
    return left >= 0 && left-- == 0;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack arguments_;
  int device_;
  at::Generator generator_;
  bool host_learns_ = false;
};

inline void run_kernel(const c10::OperatorHandle& op, Stack* stack) {
  auto results = Call(op, *stack)();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
}

inline const c10::OperatorHandle& operator_named(const char* name) {
  static std::map<std::string, c10::OperatorHandle> found;
  static std::mutex lock;
  std::lock_guard<std::mutex> held(lock);
  return found.try_emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first->second;
}

// torch asks other devices than its own for convolutions under names of their own.
inline void convolution(const c10::OperatorHandle&, Stack* stack) {
  run_kernel(operator_named("aten::convolution"), stack);
}

inline void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  // grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups, output_mask
  auto begin = stack->end() - 10;
  auto weight = begin[2].toTensor();
  auto channels = begin[6].toBool() ? weight.size(1) * begin[8].toInt() : weight.size(0);
  stack->insert(begin + 3, IValue(std::vector<int64_t>{channels}));
  run_kernel(operator_named("aten::convolution_backward"), stack);
}

inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> is_training) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!is_training.value_or(true)) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  auto scale = p == 1 ? 0.0 : 1 / (1 - p);
  return {at::mul(at::mul(input, mask), at::Scalar(scale)), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("native_dropout", native_dropout);
}

// Autocast has the lists that it has on CUDA.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

using at::Scalar;
using at::ScalarType;
using at::autocast::CastPolicy;
#if __has_include(<ATen/core/Dimname.h>)  // in torch 2.11 the macros name it, too
using at::DimnameList;
#endif

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_RESULT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace sim
