// Tensors of a device: making them, viewing them, resizing them.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "memory.h"

namespace sim {

using at::Tensor;
using c10::IntArrayRef;

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

inline bool is_on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

// The same bytes as a tensor of the CPU, which only work that runs may touch. It does not keep them.
inline Tensor on_host(const Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto* address = static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  auto view = at::from_blob(bytes_at(address), tensor.sizes(), tensor.strides(), options);
  auto* impl = view.unsafeGetTensorImpl();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

// Enters a tensor among what a launch uses.
inline void add_use(std::vector<Use>& uses, const Tensor& tensor, bool writes) {
  if (!is_on_device(tensor) || !tensor.has_storage() || tensor.numel() == 0) return;
  Held held(data);
  auto* base = static_cast<const char*>(tensor.storage().data());
  auto* block = block_at(base);
  if (!block) return;
  Region region;
  region.itemsize = tensor.itemsize();
  region.begin = reinterpret_cast<uintptr_t>(base) + tensor.storage_offset() * region.itemsize;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  region.end = region.begin + (last + 1) * region.itemsize;
  if (!tensor.is_non_overlapping_and_dense()) {
    for (int64_t d = 0; d < tensor.dim(); d++) {
      region.sizes.push_back(tensor.size(d));
      region.strides.push_back(tensor.stride(d) * int64_t(region.itemsize));
    }
  }
  uses.push_back({block, std::move(region), writes});
}

inline c10::Device place_of(std::optional<c10::Device> device) {
  auto index = device.has_value() ? device->index() : c10::DeviceIndex(-1);
  return c10::Device(TYPE, device_index(index));
}

inline Tensor empty(
    IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(place_of(device));
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(place_of(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}

// Gives a storage another size: new memory, and a copy on the current stream.
inline void resize_storage(const c10::Storage& storage, size_t nbytes) {
  c10::DeviceGuard guard(storage.device());
  auto& stream = current_stream(storage.device().index());
  auto memory = allocator.allocate(nbytes);
  auto kept = std::min(nbytes, storage.nbytes());
  auto* from = bytes_at(storage.data());
  auto* to = bytes_at(memory.get());
  if (kept) {
    std::vector<Use> uses;
    {
      Held held(data);
      for (auto* address : {storage.data(), static_cast<const void*>(memory.get())}) {
        auto begin = reinterpret_cast<uintptr_t>(address);
        uses.push_back({block_at(address), {begin, begin + kept}, address != storage.data()});
      }
    }
    enter(stream, launch_time(stream), "resize_", std::move(uses));
    launch(stream, [=] { std::memcpy(to, from, kept); });
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(nbytes);
}

inline const Tensor& resize_(const Tensor& tensor, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t needed = impl->numel() == 0 ? 0 : (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
  return tensor;
}

inline Tensor view(const Tensor& tensor, IntArrayRef size) { return at::native::view(tensor, size); }

inline Tensor as_strided(
    const Tensor& tensor, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

inline Tensor reshape_alias(const Tensor& tensor, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(tensor, size, stride);
}

inline Tensor& set_storage(
    Tensor& tensor, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  at::native::checkSetStorage(tensor, source, offset, size, stride);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  auto needed = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->itemsize(), offset);
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
  return tensor;
}

inline Tensor& set_whole_storage(Tensor& tensor, c10::Storage source) {
  auto items = int64_t(source.nbytes() / tensor.itemsize());
  return set_storage(tensor, std::move(source), 0, {items}, {});
}

inline Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline Tensor& set_nothing(Tensor& tensor) {
  c10::DeviceGuard guard(tensor.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
  return set_storage(tensor, std::move(storage), 0, {0}, {});
}

inline void record_stream(Tensor& tensor, c10::Stream stream) {
  allocator.recordStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("record_stream", record_stream);
}

}  // namespace sim
