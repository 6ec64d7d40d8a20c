// The extension: what torch asks of a device's backend, and what Python calls.
//
// One translation unit: each further one would read torch's headers for most of a minute.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/utils/pybind.h>

#include "attention.h"
#include "cuda_names.h"
#include "group.h"
#include "kernels.h"
#include "recurrent.h"

namespace py = pybind11;

namespace sim {

std::string python_line() {
  py::gil_scoped_acquire gil;
  return py::module_::import("tp_simulator._lines").attr("current_line")().cast<std::string>();
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return was_used; }

  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device_index(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = c10::DeviceIndex(current_device);
    current_device = device_index(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device = -1) const override {
    return default_generator(device_index(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device = -1) const override {
    return at::make_generator<Generator>(device_index(device));
  }

  bool isPinnedPtr(const void* place) const override { return pinned_at(place) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void* address) const override {
    auto* memory = memory_at(address);
    TORCH_CHECK(memory, "sim: no device has the address ", address);
    return c10::Device(TYPE, memory - memories.data());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};
static Hooks hooks;

// All that was launched, on every device that lives.
void finish() {
  for (int device = 0; device < device_count(); device++)
    if (devices[device].failure.empty()) synchronize_device(device);
}

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  using without_gil = py::call_guard<py::gil_scoped_release>;

  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("say_cuda", [](const py::type& device, const std::vector<py::type>& types) {
    for (auto& type : types) make_by_name(reinterpret_cast<PyTypeObject*>(type.ptr()));
    say_cuda(reinterpret_cast<PyTypeObject*>(device.ptr()));
  });

  m.def("device_count", &device_count);
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { current_device = device_index(device); });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("was_used", [] { return was_used.load(); });
  m.def("in_bad_fork", [] { return in_bad_fork.load(); });

  m.def("be_late", [](uint64_t seed) {
    Held held(data);
    is_late = true;
    seed_of_order = seed;
    is_uneven = seed != 0;
    dice.seed(seed);
  });
  m.def("be_prompt", [] {
    Held held(data);
    is_late = is_uneven = false;
  });
  m.def("seed", [] {
    Held held(data);
    return is_late ? std::optional<uint64_t>(seed_of_order) : std::nullopt;
  });
  m.def("finish", &finish, without_gil());

  m.def("make_group", [](c10::intrusive_ptr<c10d::Backend> gloo, const c10::intrusive_ptr<c10d::Store>& store, int rank,
                         int size, std::string name, int64_t timeout) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Group>(std::move(gloo), store, rank, size, std::move(name), milliseconds(timeout));
  });
  m.def("end", [] { is_ending = true; });

  m.def("races", [] {
    Held held(data);
    return races;
  });
  m.def("counts", [] {
    Held held(data);
    return counts;
  });

  m.def("set_total_memory", [](int device, size_t nbytes) {
    Held held(data);
    memories[device_index(device)].total = nbytes;
  });
  m.def("total_memory", [](int device) {
    Held held(data);
    return memories[device_index(device)].total;
  });
  m.def("fail_at_kernel", [](int device, int64_t number) {
    Held held(data);
    devices[device_index(device)].kernels_left = number - 1;
  });
  m.def("revive", [](int device) {
    Held held(data);
    devices[device_index(device)].failure.clear();
    devices[device].kernels_left = -1;
  });
}
