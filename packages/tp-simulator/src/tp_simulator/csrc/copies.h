// Copies between the host and the devices.
//
// A copy that does not block reads and writes as late as it legally may: its destination is poison until then, and
// pinned memory that it reads is compared with what lay there at the launch. A copy from or to pageable memory
// blocks no less than a card's: the driver takes what it copies at once, and the host waits for what it gets.
#pragma once
#include <ATen/ops/clone.h>

#include "tensors.h"

namespace sim {

// Whether nothing that was launched has yet to use these bytes, so that poison may be put there.
inline bool is_idle(const Use& use) {
  for (auto& access : use.block->history.accesses())
    for (auto& [key, stream] : streams)
      if (stream->number == access.stream && stream->done < access.time) return false;
  return true;
}

// Has all work done that uses pinned memory: it may be done at any time, and then poison may be put there.
inline void finish_with(const Pinned& memory) {
  std::map<Stream*, uint64_t> used;
  {
    Held held(data);
    used = memory.used;
  }
  for (auto& [stream, position] : used) run_until(*stream, position);
}

inline std::vector<char> bytes_of(const Tensor& tensor) {
  auto dense = tensor.contiguous();
  auto* begin = static_cast<const char*>(dense.data_ptr());
  return std::vector<char>(begin, begin + dense.nbytes());
}

inline void note_use(Pinned& memory, Stream& stream, uint64_t time) {
  Held held(data);
  memory.used[&stream] = time;
}

inline void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto& stream = current_stream(to.device().index());
  std::vector<Use> uses;
  add_use(uses, to, true);
  auto* memory = pinned_at(from.data_ptr());
  bool is_lazy = non_blocking && memory;
  auto target = on_host(to);
  if (is_lazy && is_late) {
    Held held(data);
    if (!uses.empty() && uses[0].region.is_dense() && is_idle(uses[0]))
      std::memset(bytes_at(reinterpret_cast<char*>(uses[0].region.begin)), POISON, to.nbytes());
  }
  auto time = launch_time(stream);
  enter(stream, time, "a copy to the device", uses);
  count(is_lazy ? "copies to the device" : "blocking copies to the device");
  if (is_lazy) {
    auto source = from.detach();
    note_use(*memory, stream, time);
    launch(stream, [target, source, before = bytes_of(source)]() mutable {
      target.copy_(source);
      if (before != bytes_of(source))
        add_race("pinned memory was changed before its non_blocking copy to the device was known to be done");
    });
    return;
  }
  launch(stream, [target, source = from.clone()]() mutable { target.copy_(source); });
  if (non_blocking) return;
  count("synchronizations");
  synchronize(stream);
}

inline void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto& stream = current_stream(from.device().index());
  std::vector<Use> uses;
  add_use(uses, from, false);
  auto* memory = pinned_at(to.data_ptr());
  bool is_lazy = non_blocking && memory;
  auto time = launch_time(stream);
  enter(stream, time, "a copy to the host", uses);
  count(is_lazy ? "copies to the host" : "blocking copies to the host");
  auto source = on_host(from);
  auto target = to.detach();
  std::vector<char> poison;
  if (is_lazy && is_late) {
    finish_with(*memory);
    note_use(*memory, stream, time);
    if (target.is_non_overlapping_and_dense()) std::memset(target.data_ptr(), POISON, target.nbytes());
    poison = bytes_of(target);
  }
  launch(stream, [source, target, poison]() mutable {
    if (!poison.empty() && poison != bytes_of(target))
      add_race("host memory was written before a non_blocking copy to it was known to be done");
    target.copy_(source);
  });
  if (is_lazy) return;
  count("synchronizations");
  synchronize(stream);
}

inline void copy_between_devices(const Tensor& from, const Tensor& to) {
  // As on CUDA: on the source's stream, and each of the two streams waits for the other.
  auto& stream = current_stream(from.device().index());
  auto& other = current_stream(to.device().index());
  wait_for(stream, other);
  std::vector<Use> uses;
  add_use(uses, from, false);
  add_use(uses, to, true);
  enter(stream, launch_time(stream), "a copy", uses);
  count(&stream == &other ? "kernels" : "copies between devices");
  launch(stream, [source = on_host(from), target = on_host(to)]() mutable { target.copy_(source); });
  wait_for(other, stream);
}

inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.numel() == 0) return to;
  auto device = is_on_device(to) ? to.device() : from.device();
  check_usable(device.index());
  if (!is_on_device(from)) {
    copy_to_device(from, to, non_blocking);
  } else if (!is_on_device(to)) {
    copy_to_host(from, to, non_blocking);
  } else {
    copy_between_devices(from, to);
  }
  return to;
}

inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

inline at::Scalar local_scalar_dense(const Tensor& tensor) {
  auto& stream = current_stream(tensor.device().index());
  std::vector<Use> uses;
  add_use(uses, tensor, false);
  enter(stream, launch_time(stream), "item", uses);
  auto scalar = std::make_shared<at::Scalar>();
  launch(stream, [scalar, source = on_host(tensor)] { *scalar = source.item(); });
  count("synchronizations");
  synchronize(stream);
  return *scalar;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

// A copy takes conjugates and negatives as they are. Without these, torch would make them plain first, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace sim
