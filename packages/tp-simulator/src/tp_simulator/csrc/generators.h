// Random numbers: as on CUDA, a generator is a seed and an offset that each drawing kernel moves on.
//
// The launch takes the offset, so the numbers do not depend on when the kernel runs.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>

#include "streams.h"

namespace sim {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    // Whatever mode makes tensors of another kind at present: this one has values.
    auto state = at::detail::empty_cpu({2 * sizeof(uint64_t)}, at::kByte);
    auto* place = static_cast<uint64_t*>(state.data_ptr());
    place[0] = seed_;
    place[1] = offset_;
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.device().is_cpu() && state.numel() == 2 * sizeof(uint64_t) && state.itemsize() == 1,
        "sim: the state of a generator is 16 bytes on the CPU, not ", state.numel(), " items on ", state.device());
    auto* place = static_cast<const uint64_t*>(state.data());
    seed_ = place[0];
    offset_ = place[1];
  }

  // The generator of the CPU from which one kernel draws.
  at::Generator next() {
    std::lock_guard<std::mutex> held(mutex_);
    std::seed_seq mixed{uint32_t(seed_), uint32_t(seed_ >> 32), uint32_t(offset_), uint32_t(offset_ >> 32)};
    offset_ += 4;  // as CUDA's, which counts numbers in fours
    std::vector<uint32_t> words(2);
    mixed.generate(words.begin(), words.end());
    return at::make_generator<at::CPUGeneratorImpl>(words[0] | uint64_t(words[1]) << 32);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

inline const at::Generator& default_generator(int device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < device_count(); index++) made.push_back(at::make_generator<Generator>(index));
    return made;
  }();
  return all[device];
}

}  // namespace sim
