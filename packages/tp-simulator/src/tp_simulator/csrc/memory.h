// Device memory, as a caching allocator of CUDA's rules hands it out, and pinned memory of the host.
//
// A device address has nothing behind it: it lies in a range that no access is allowed in, and the bytes lie at a
// constant distance above. Kernels here add the distance. Code of the host that follows a device pointer gets the
// signal that it would get with a card, after a sentence which says so.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "streams.h"

namespace sim {

constexpr size_t ADDRESSES = size_t(1) << 40;  // of each device; none is used twice
constexpr size_t MIB = size_t(1) << 20;
// Every floating-point type reads these bytes as NaN, and signed integers as -1.
constexpr int POISON = 0xFF;

struct Block {
  Stream* home;
  char* address;
  size_t size;
  bool is_small;
  bool is_free = true;
  size_t requested = 0;
  Block* previous = nullptr;  // neighbours in the segment
  Block* next = nullptr;
  std::map<Stream*, uint64_t> recorded;  // by record_stream, with what each had been given when the block was freed
  std::map<size_t, uint64_t> finished;   // by a stream's number: up to where a group kept the block until it was done
  History history;
};

struct Memory {
  char* base = nullptr;
  char* unused = nullptr;  // addresses from here on were never handed out
  size_t total = size_t(16) << 30;
  std::map<char*, Block*> blocks;  // all of them, by address
  std::map<std::pair<Stream*, bool>, std::set<std::pair<size_t, char*>>> cached;  // free ones, by size and address
  std::vector<Block*> leaving;  // freed, and still used by a recorded stream
  c10::CachingDeviceAllocator::DeviceStats stats;
};

inline auto& memories = *new std::array<Memory, MOST_DEVICES>;

struct Pinned {
  size_t nbytes;
  std::map<Stream*, uint64_t> used;  // up to which work of a stream
};
inline auto& pinned = *new std::map<const char*, Pinned>;

// -- Addresses ----------------------------------------------------------------------------------------------------

inline struct sigaction previous_action;

inline void on_fault(int, siginfo_t* info, void*) {
  auto* address = static_cast<char*>(info->si_addr);
  for (auto& memory : memories) {
    if (!memory.base || address < memory.base || address >= memory.base + ADDRESSES) continue;
    // Nothing but write() may be called here.
    auto say = [](const char* text, size_t length) { return write(STDERR_FILENO, text, length) > 0; };
    const char begin[] = "tp_simulator: code of the host followed an address of the memory of sim:";
    auto index = &memory - memories.data();
    const char digits[] = {char('0' + index / 10), char('0' + index % 10), '\n'};
    say(begin, sizeof(begin) - 1);
    say(index < 10 ? digits + 1 : digits, index < 10 ? 2 : 3);
  }
  // Whoever was asked before deals with it, when the instruction runs again.
  sigaction(SIGSEGV, &previous_action, nullptr);
}

inline void reserve_addresses(Memory& memory) {
  if (memory.base) return;
  auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  auto* place = mmap(nullptr, 2 * ADDRESSES, PROT_NONE, flags, -1, 0);
  TORCH_CHECK(place != MAP_FAILED, "sim: this process may not reserve addresses: ", std::strerror(errno));
  memory.base = memory.unused = static_cast<char*>(place);
  static bool is_installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGSEGV, &action, &previous_action) == 0;
  }();
  (void)is_installed;
}

inline Memory* memory_at(const void* address) {
  for (auto& memory : memories)
    if (memory.base && address >= memory.base && address < memory.base + ADDRESSES) return &memory;
  return nullptr;
}

// Where the bytes of a device address are.
inline char* bytes_at(const void* address) {
  return address ? const_cast<char*>(static_cast<const char*>(address)) + ADDRESSES : nullptr;
}

inline Block* block_at(const void* address) {
  auto* memory = memory_at(address);
  if (!memory) return nullptr;
  auto after = memory->blocks.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
  return after == memory->blocks.begin() ? nullptr : std::prev(after)->second;
}

// -- The cache: rounding, segments, splitting, merging ------------------------------------------------------------

inline size_t rounded(size_t nbytes) { return std::max<size_t>(512, (nbytes + 511) / 512 * 512); }

inline size_t segment_size(size_t size) {
  if (size <= MIB) return 2 * MIB;
  if (size < 10 * MIB) return 20 * MIB;
  return (size + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
}

inline void change(c10::CachingAllocator::StatArray& stat, const Block& block, int64_t amount) {
  for (auto index : {size_t(0), size_t(block.is_small ? 1 : 2)}) {
    if (amount > 0) stat[index].increase(amount);
    if (amount < 0) stat[index].decrease(-amount);
  }
}

inline void poison_later(Stream& stream, char* address, size_t size) {
  // Not by launch(): this may be called from anywhere, as the last reference to a tensor goes.
  stream.queue.push_back({[=] { std::memset(bytes_at(address), POISON, size); }});
  ++stream.launched;
}

inline void enter_cache(Memory& memory, Block* block) {
  auto& cached = memory.cached[{block->home, block->is_small}];
  block->is_free = true;
  for (bool forward : {false, true}) {
    auto* other = forward ? block->next : block->previous;
    if (!other || !other->is_free) continue;
    cached.erase({other->size, other->address});
    auto* first = forward ? block : other;
    auto* second = forward ? other : block;
    first->size += second->size;
    first->next = second->next;
    if (second->next) second->next->previous = first;
    memory.blocks.erase(second->address);
    delete second;
    block = first;
  }
  cached.insert({block->size, block->address});
}

// Returns blocks to the cache whose recorded streams have done their work.
inline void take_back(Memory& memory) {
  std::vector<Block*> staying;
  for (auto* block : memory.leaving) {
    bool is_used = false;
    for (auto& [stream, position] : block->recorded) is_used = is_used || stream->done < position;
    if (is_used) {
      staying.push_back(block);
      continue;
    }
    block->recorded.clear();
    block->finished.clear();
    change(memory.stats.active_bytes, *block, -int64_t(block->size));
    poison_later(*block->home, block->address, block->size);
    enter_cache(memory, block);
  }
  memory.leaving = std::move(staying);
}

inline Block* new_segment(Memory& memory, Stream& home, size_t size) {
  auto whole = segment_size(size);
  auto reserved = size_t(memory.stats.reserved_bytes[0].current);
  if (reserved + whole > memory.total) return nullptr;
  auto* address = memory.unused;
  auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(bytes_at(address), whole, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) return nullptr;
  memory.unused += whole;
  auto* block = new Block{&home, address, whole, size <= MIB};
  memory.blocks[address] = block;
  change(memory.stats.reserved_bytes, *block, whole);
  change(memory.stats.segment, *block, 1);
  std::memset(bytes_at(address), POISON, whole);
  return block;
}

// Gives back the segments in which nothing is used. All work must be done: it may still read what is freed.
inline void release_segments(Memory& memory) {
  for (auto& [key, cached] : memory.cached) {
    for (auto place = cached.begin(); place != cached.end();) {
      auto* block = memory.blocks.at(place->second);
      if (block->previous || block->next) {
        ++place;
        continue;
      }
      auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
      mmap(bytes_at(block->address), block->size, PROT_NONE, flags, -1, 0);
      change(memory.stats.reserved_bytes, *block, -int64_t(block->size));
      change(memory.stats.segment, *block, -1);
      memory.blocks.erase(block->address);
      place = cached.erase(place);
      delete block;
    }
  }
}

inline Block* find_block(Memory& memory, Stream& home, size_t size) {
  take_back(memory);
  bool is_small = size <= MIB;
  auto& cached = memory.cached[{&home, is_small}];
  auto place = cached.lower_bound({size, nullptr});
  Block* block;
  if (place != cached.end()) {
    block = memory.blocks.at(place->second);
    cached.erase(place);
  } else {
    block = new_segment(memory, home, size);
    if (!block) return nullptr;
  }
  auto rest = block->size - size;
  if (is_small ? rest >= 512 : rest > MIB) {
    auto* remainder = new Block{&home, block->address + size, rest, is_small};
    remainder->previous = block;
    remainder->next = block->next;
    if (block->next) block->next->previous = remainder;
    block->next = remainder;
    block->size = size;
    memory.blocks[remainder->address] = remainder;
    cached.insert({remainder->size, remainder->address});
  }
  block->is_free = false;
  return block;
}

inline std::string in_mib(size_t nbytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f MiB", double(nbytes) / MIB);
  return text;
}

// -- Accesses -----------------------------------------------------------------------------------------------------

// The line of Python that is running, in code that is not torch's.
std::string python_line();

struct Use {
  Block* block;
  Region region;
  bool writes;
};

// Enters what a launch reads and writes, and reports what it is not ordered after.
inline void enter(Stream& stream, uint64_t time, const std::string& what, std::vector<Use> uses) {
  std::set<std::string> found;
  {
    Held held(data);
    for (auto& use : uses) {
      // Of each other stream the last access, which the earlier ones come before.
      std::map<size_t, std::string> by_stream;
      auto race = [&](const Access& earlier) {
        std::string other;
        for (auto& [key, one] : streams)
          if (one->number == earlier.stream) other = one->name();
        by_stream[earlier.stream] = what + " on " + stream.name() + (use.writes ? " writes" : " reads") + " what " +
            earlier.what + " on " + other + (earlier.writes ? " writes" : " reads") + ", and nothing orders them";
      };
      use.block->history.enter({use.region, stream.number, time, use.writes, what}, stream.clock, host, race);
      for (auto& [other, text] : by_stream) found.insert(text);
    }
  }
  if (found.empty()) return;
  auto line = python_line();
  for (auto& text : found) add_race(line + text);
}

// -- The allocators -----------------------------------------------------------------------------------------------

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    auto device = current_device;
    check_usable(device);
    c10::Device place(TYPE, device);
    if (nbytes == 0) return {nullptr, nullptr, &release, place};
    auto& memory = memories[device];
    auto& home = current_stream(device);
    auto size = rounded(nbytes);
    Block* block = allocate_block(memory, home, size);
    if (!block) {
      // As CUDA's: what is cached is given back, for which the device has to be done.
      emptyCacheOf(device);
      block = allocate_block(memory, home, size);
    }
    Held held(data);
    if (!block) {
      memory.stats.num_ooms++;
      auto allocated = size_t(memory.stats.allocated_bytes[0].current);
      auto reserved = size_t(memory.stats.reserved_bytes[0].current);
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "sim out of memory. Tried to allocate ", in_mib(nbytes), ". sim:", device,
          " has a total capacity of ", in_mib(memory.total), " of which ", in_mib(memory.total - reserved),
          " is free. ", in_mib(allocated), " is allocated by PyTorch, and ", in_mib(reserved - allocated),
          " is reserved by PyTorch but unallocated.");
    }
    block->requested = nbytes;
    // Memory belongs to its stream from here on: what the stream was given before may have used it as another tensor.
    auto begin = reinterpret_cast<uintptr_t>(block->address);
    block->history.begin({{begin, begin + block->size}, home.number, home.launched, true, "the allocation"});
    change(memory.stats.allocation, *block, 1);
    change(memory.stats.allocated_bytes, *block, block->size);
    change(memory.stats.active_bytes, *block, block->size);
    change(memory.stats.requested_bytes, *block, nbytes);
    return {block->address, block->address, &release, place};
  }

  static Block* allocate_block(Memory& memory, Stream& home, size_t size) {
    Held held(data);
    reserve_addresses(memory);
    return find_block(memory, home, size);
  }

  // May run anywhere, also while Python ends: it takes no other lock, and never throws.
  static void release(void* address) {
    if (!address) return;
    Held held(data);
    auto& memory = *memory_at(address);
    auto* block = block_at(address);
    auto& home = *block->home;
    auto known = clock_of(home);
    for (auto& access : block->history.accesses()) {
      if (access.stream == home.number || known[access.stream] >= access.time) continue;
      auto finished = block->finished.find(access.stream);
      if (finished != block->finished.end() && finished->second >= access.time) continue;
      bool is_recorded = false;
      for (auto& [stream, position] : block->recorded) is_recorded = is_recorded || stream->number == access.stream;
      if (is_recorded) continue;
      for (auto& [key, stream] : streams) {
        if (stream->number == access.stream)
          add_race(
              "memory of " + home.name() + " is freed while " + access.what + " on " + stream->name() +
              " may yet use it: call record_stream, or have the first stream wait before");
      }
      break;
    }
    change(memory.stats.allocation, *block, -1);
    change(memory.stats.allocated_bytes, *block, -int64_t(block->size));
    change(memory.stats.requested_bytes, *block, -int64_t(block->requested));
    for (auto& [stream, position] : block->recorded) position = stream->launched;
    memory.leaving.push_back(block);
    take_back(memory);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    std::memcpy(bytes_at(to), bytes_at(from), nbytes);
  }
  bool initialized() override { return was_used; }

  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    for (int device = 0; device < device_count(); device++) emptyCacheOf(device);
  }
  static void emptyCacheOf(int device) {
    finish_all();
    {
      Held held(data);
      take_back(memories[device]);
    }
    finish_all();  // what was taken back is poisoned
    Held held(data);
    for (auto& [key, stream] : streams)
      if (!stream->queue.empty()) return;  // another thread has launched work, which may use any memory
    release_segments(memories[device]);
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Held held(data);
    auto* block = block_at(pointer.get());
    auto& recorded = stream_of(stream);
    if (block && block->home != &recorded) block->recorded[&recorded] = 0;
  }

  // A group has kept the block until its work at this position was done: whoever frees it needs no wait.
  static void finish(const void* address, const Stream& stream, uint64_t position) {
    Held held(data);
    auto* block = block_at(address);
    if (!block) return;
    auto& finished = block->finished[stream.number];
    finished = std::max(finished, position);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Held held(data);
    return memories[device_index(device)].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }
  // Not marked `override`, as torch asks for it only since 2.10.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    Held held(data);
    auto& memory = memories[device_index(device)];
    return {memory.total - size_t(memory.stats.reserved_bytes[0].current), memory.total};
  }

 private:
  // A stream of another device may use this memory, too.
  static void finish_all() {
    for (int device = 0; device < device_count(); device++)
      if (devices[device].failure.empty()) synchronize_device(device);
  }

  template <class Function>
  void each_stat(c10::DeviceIndex device, Function function) {
    Held held(data);
    auto& stats = memories[device_index(device)].stats;
    for (auto* kind : {&stats.allocation, &stats.segment, &stats.allocated_bytes, &stats.reserved_bytes,
                       &stats.active_bytes, &stats.requested_bytes})
      for (auto& stat : *kind) function(stat);
  }
};

static Allocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

inline void Guard::recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const {
  allocator.recordStream(pointer, stream);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* place = nullptr;
    if (nbytes) {
      TORCH_CHECK(posix_memalign(&place, 64, nbytes) == 0, "sim: no pinned memory of ", nbytes, " bytes");
      Held held(data);
      pinned[static_cast<char*>(place)] = {nbytes, {}};
    }
    return {place, place, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* place) {
    Held held(data);
    pinned.erase(static_cast<char*>(place));
    std::free(place);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
static PinnedAllocator pinned_allocator;

// The pinned memory that a place lies in; nothing if it is pageable.
inline Pinned* pinned_at(const void* place) {
  Held held(data);
  auto after = pinned.upper_bound(static_cast<const char*>(place));
  if (after == pinned.begin()) return nullptr;
  auto& [begin, found] = *std::prev(after);
  return place < begin + found.nbytes ? &found : nullptr;
}

}  // namespace sim
