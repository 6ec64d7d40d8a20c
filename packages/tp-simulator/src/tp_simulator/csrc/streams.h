// Streams, the queue of each, events, and when work runs.
//
// Launched work waits in the queue of its stream. By default it runs at once. Under `hostile` it stays there until
// the last legal moment: until the host waits for it, or other work does that has to run. A seed other than 0 lets
// some streams get ahead by some work, so that each is another legal order.
//
// Work that waits for other ranks is never run where it is launched: a card's host goes on, and may have to, so that
// the other ranks come as far. A thread of its group runs it, or whoever has to wait for it.
//
// Two locks. `data` guards what is in memory here; it is held briefly, and nothing is called that could take another
// lock, or Python's. `engine` is held while work runs, one piece at a time; who takes it has let go of Python's lock,
// since work may be a kernel that somebody wrote in Python.
#pragma once
#include <Python.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>

#include "clocks.h"

namespace sim {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int64_t STREAMS_IN_POOL = 32;  // of each device, handed out in turn, as CUDA's
constexpr int MOST_DEVICES = 16;

struct Stream;

struct Work {
  std::function<void()> run;
  Stream* after = nullptr;  // runs once this stream has come that far: an event
  uint64_t position = 0;
  bool waits_for_ranks = false;
};

struct Stream {
  int device;
  int64_t id;
  size_t number;
  std::deque<Work> queue;
  bool is_busy = false;  // with work that waits for other ranks
  uint64_t launched = 0;
  uint64_t done = 0;
  Clock clock;

  std::string name() const {
    return "stream " + std::to_string(id) + " of sim:" + std::to_string(device);
  }
};

struct Event {
  Stream* stream = nullptr;
  uint64_t position = 0;
  Clock clock;
  // Shared, as the work that takes the time may outlive the event.
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
};

struct Device {
  std::string failure;         // what killed it, if it is dead
  int64_t kernels_left = -1;   // until it dies, if it is to die
  int64_t next_stream = 0;
};

// None of these is destroyed: tensors may be freed while a process ends.
inline auto& data = *new std::recursive_mutex;
inline auto& engine = *new std::mutex;
inline auto& work_is_done = *new std::condition_variable;  // with `engine`: a stream is no longer busy
inline auto& streams = *new std::map<std::pair<int, int64_t>, std::unique_ptr<Stream>>;
inline auto& devices = *new std::array<Device, MOST_DEVICES>;
inline auto& host = *new Clock;  // what the host has waited for
inline auto& counts = *new std::map<std::string, int64_t>;
inline auto& races = *new std::vector<std::string>;
inline bool is_late = false;
inline bool is_uneven = false;  // whether dice let some streams get ahead
inline uint64_t seed_of_order = 0;
inline std::mt19937_64 dice;
inline std::atomic<bool> was_used{false};
inline std::atomic<bool> in_bad_fork{false};
inline thread_local int current_device = 0;
inline thread_local int64_t current_streams[MOST_DEVICES] = {0};

using Held = std::lock_guard<std::recursive_mutex>;

// Adds a race, also to the file that SIM_RACES names: there the races of all processes of a program come together.
inline void add_race(const std::string& text) {
  Held held(data);
  races.push_back(text);
  const char* path = std::getenv("SIM_RACES");
  if (!path || !*path) return;
  std::ofstream file(path, std::ios::app);
  file << text + "\n" << std::flush;  // one write, which others do not come into
}

// Lets go of Python's lock, where this thread has it.
class WithoutGil {
 public:
  WithoutGil() : saved_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (saved_) PyEval_RestoreThread(saved_);
  }

 private:
  PyThreadState* saved_;
};

// Whatever the thread is about that runs work (autograd, autocast, a mode of Python's): a kernel sees none of it.
class Isolated {
  c10::impl::ForceDispatchKeyGuard keys_{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

inline int device_count() {
  static int count = [] {
    const char* text = std::getenv("SIM_DEVICES");
    return std::clamp(text ? std::atoi(text) : 0, 0, MOST_DEVICES);
  }();
  return count;
}

inline int device_index(c10::DeviceIndex index) {
  TORCH_CHECK(index < device_count(), "sim: invalid device ordinal ", int(index), ": there are ", device_count());
  return index < 0 ? current_device : index;
}

inline Stream& stream_of(int device, int64_t id) {
  Held held(data);
  auto& stream = streams[{device, id}];
  if (!stream) {
    stream = std::make_unique<Stream>();
    stream->device = device;
    stream->id = id;
    stream->number = streams.size() - 1;
  }
  return *stream;
}

inline Stream& stream_of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

inline Stream& current_stream(int device) { return stream_of(device, current_streams[device]); }

inline c10::Stream as_torch(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), id);
}

inline void count(const std::string& name) {
  Held held(data);
  counts[name]++;
}

// What was launched before a fork stays with the parent, as a card's context does.
inline void check_usable(int device) {
  TORCH_CHECK(
      !in_bad_fork,
      "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, you must use the 'spawn' "
      "start method");
  if (!was_used.exchange(true)) pthread_atfork(nullptr, nullptr, [] { in_bad_fork = true; });
  Held held(data);
  if (!devices[device].failure.empty())
    throw c10::AcceleratorError(
        {__func__, __FILE__, uint32_t(__LINE__)}, 719,
        "sim:" + std::to_string(device) + " is dead: " + devices[device].failure +
            "\nThe work may have been launched earlier than the line that says so. "
            "A card would need a new process; tp_simulator.revive() brings this device back.");
}

// All that waits for a dead device waits no longer.
inline void die(int device, const std::string& why) {
  Held held(data);
  if (devices[device].failure.empty()) devices[device].failure = why;
  for (auto& [key, stream] : streams) {
    if (stream->device != device) continue;
    stream->queue.clear();
    stream->done = stream->launched;
  }
}

// Runs the work of a stream up to a position, and before it what its waits ask of other streams. Unless it may wait,
// it leaves off at work for which other ranks are needed. Returns whether the stream has come so far.
inline bool run_until(Stream& stream, uint64_t position, bool may_wait = true) {
  WithoutGil no_gil;
  std::unique_lock<std::mutex> running(engine);
  for (;;) {
    Work work;
    uint64_t number = 0;
    Stream* awaited = nullptr;
    uint64_t awaited_position = 0;
    bool is_busy = false;
    {
      Held held(data);
      if (stream.done >= position) return true;
      is_busy = stream.is_busy;
      if (!is_busy) {
        if (stream.queue.empty()) return true;
        auto& front = stream.queue.front();
        if (front.after && front.after->done < front.position) {
          awaited = front.after;
          awaited_position = front.position;
        } else if (front.waits_for_ranks && !may_wait) {
          return false;
        } else {
          number = stream.launched - stream.queue.size() + 1;
          work = std::move(front);
          stream.queue.pop_front();
          stream.is_busy = work.waits_for_ranks;
        }
      }
    }
    if (is_busy) {
      if (!may_wait) return false;
      work_is_done.wait(running);
      continue;
    }
    if (awaited) {
      running.unlock();
      if (!run_until(*awaited, awaited_position, may_wait)) return false;
      running.lock();
      continue;
    }
    // Other streams go on while this one waits for other ranks: they may be what those wait for.
    if (work.waits_for_ranks) running.unlock();
    std::string failure;
    try {
      Isolated isolated;
      if (work.run) work.run();
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (!failure.empty()) die(stream.device, failure);
    if (work.waits_for_ranks) running.lock();
    {
      Held held(data);
      stream.is_busy = false;
      // A device that died has thrown away what it was given.
      if (failure.empty()) stream.done = std::max(stream.done, number);
    }
    if (work.waits_for_ranks) work_is_done.notify_all();
  }
}

inline void run_all(Stream& stream) {
  std::unique_lock<std::recursive_mutex> held(data);
  auto position = stream.launched;
  held.unlock();
  run_until(stream, position);
}

// Puts work at the end of a stream's queue, at the time that `launch_time` has said.
inline void launch(Stream& stream, std::function<void()> run) {
  uint64_t position;
  {
    Held held(data);
    stream.queue.push_back({std::move(run)});
    position = ++stream.launched;
    if (is_late) position = 0;
    if (is_late && is_uneven) {
      // One launch of four lets its stream get ahead, by as much as the dice say.
      auto roll = dice();
      auto waiting = stream.launched - stream.done;
      if (roll % 4 == 0) position = stream.done + 1 + (roll >> 8) % waiting;
    }
  }
  if (position) run_until(stream, position, false);
  if (!is_late) check_usable(stream.device);
}

// The time that the next launch on a stream will have: it is ordered after all that the host has waited for.
inline uint64_t launch_time(Stream& stream) {
  Held held(data);
  stream.clock.merge(host);
  auto time = stream.launched + 1;
  stream.clock.learn(stream.number, time);
  return time;
}

// What whoever waits for all that a stream has been given is ordered after.
inline Clock clock_of(Stream& stream) {
  Held held(data);
  stream.clock.merge(host);
  stream.clock.learn(stream.number, stream.launched);
  return stream.clock;
}

// Has a stream wait for what another one has been given so far.
inline void wait_for(Stream& stream, Stream& other, uint64_t position, const Clock& clock) {
  if (&stream == &other) return;
  Held held(data);
  stream.clock.merge(host);
  stream.clock.merge(clock);
  stream.queue.push_back({nullptr, &other, position});
  ++stream.launched;
  stream.clock.learn(stream.number, stream.launched);
}

inline void wait_for(Stream& stream, Stream& other) {
  Held held(data);
  wait_for(stream, other, other.launched, clock_of(other));
}

// The host waits for all that a stream has been given.
inline void synchronize(Stream& stream) {
  check_usable(stream.device);
  uint64_t position;
  Clock clock;
  {
    Held held(data);
    position = stream.launched;
    clock = clock_of(stream);
  }
  run_until(stream, position);
  check_usable(stream.device);
  Held held(data);
  host.merge(clock);
}

inline void synchronize_device(int device) {
  std::vector<Stream*> all;
  {
    Held held(data);
    for (auto& [key, stream] : streams)
      if (stream->device == device) all.push_back(stream.get());
    if (is_uneven) std::shuffle(all.begin(), all.end(), dice);
  }
  for (auto* stream : all) synchronize(*stream);
}

// Whether a stream has come so far. Under `hostile` asking runs one more piece of work, so that a program which asks
// until the answer is yes comes to an end.
inline bool query(Stream& stream, uint64_t position, const Clock& clock) {
  uint64_t next;
  {
    Held held(data);
    next = is_late ? std::min(position, stream.done + 1) : position;
  }
  run_until(stream, next, false);
  Held held(data);
  if (stream.done < position) return false;
  host.merge(clock);
  return true;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;

  c10::DeviceType type() const override { return TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Device getDevice() const override { return c10::Device(TYPE, current_device); }
  void setDevice(c10::Device device) const override { current_device = device_index(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    auto index = device_index(device.index());
    return as_torch(index, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_torch(device_index(device.index()), 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/ = 0) const override {
    auto index = device_index(device.index());
    Held held(data);
    return as_torch(index, 1 + devices[index].next_stream++ % STREAMS_IN_POOL);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*isHighPriority*/ = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& asked = stream_of(stream);
    std::unique_lock<std::recursive_mutex> held(data);
    auto position = asked.launched;
    auto clock = clock_of(asked);
    held.unlock();
    return query(asked, position, clock);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count("synchronizations");
    synchronize(stream_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count("synchronizations");
    synchronize_device(device_index(device));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag)
      const override {
    auto& recorded = stream_of(stream);
    if (!*event) *event = new Event();
    auto& made = *static_cast<Event*>(*event);
    auto time = std::make_shared<std::chrono::steady_clock::time_point>();
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      launch_time(recorded);
      launch(recorded, [time] { *time = std::chrono::steady_clock::now(); });
    }
    Held held(data);
    made.stream = &recorded;
    made.position = recorded.launched;
    made.clock = clock_of(recorded);
    made.time = time;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto& made = *static_cast<Event*>(event);
    wait_for(stream_of(stream), *made.stream, made.position, made.clock);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& made = *static_cast<Event*>(event);
    return query(*made.stream, made.position, made.clock);
  }
  void synchronizeEvent(void* event) const override {
    count("synchronizations");
    if (!event) return;
    auto& made = *static_cast<Event*>(event);
    run_until(*made.stream, made.position);
    check_usable(made.stream->device);
    Held held(data);
    host.merge(made.clock);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    auto& start = *static_cast<Event*>(first);
    auto& end = *static_cast<Event*>(second);
    Held held(data);
    TORCH_CHECK(
        start.stream->done >= start.position && end.stream->done >= end.position,
        "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(*end.time - *start.time).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override;
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace sim
