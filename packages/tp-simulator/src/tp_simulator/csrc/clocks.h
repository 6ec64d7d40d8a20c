// Which work is ordered after which: vector clocks, and the accesses of memory that nothing orders.
//
// Every stream has a number, its place in all clocks, and counts what is launched on it. A clock says of each
// stream up to which work one is ordered after it: through events, through stream order, or since the host
// waited. Two accesses of the same bytes race if one of them writes and the later launch's clock lacks the
// earlier one.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace sim {

class Clock {
 public:
  uint64_t operator[](size_t stream) const { return stream < known_.size() ? known_[stream] : 0; }

  void learn(size_t stream, uint64_t time) {
    if (stream >= known_.size()) known_.resize(stream + 1, 0);
    known_[stream] = std::max(known_[stream], time);
  }

  void merge(const Clock& other) {
    for (size_t i = 0; i < other.known_.size(); i++) learn(i, other.known_[i]);
  }

 private:
  std::vector<uint64_t> known_;
};

// The bytes that a tensor covers. Sizes and strides (in bytes) are kept where these have holes: two halves of the
// columns of a matrix have extents that overlap, and no byte in common.
struct Region {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  size_t itemsize = 1;
  std::vector<int64_t> sizes, strides;

  bool is_dense() const { return sizes.empty(); }

  template <class Function>
  void each_item(Function function) const {
    if (is_dense()) {
      for (auto byte = begin; byte < end; byte += itemsize) function(byte);
      return;
    }
    std::vector<int64_t> index(sizes.size(), 0);
    for (;;) {
      auto place = begin;
      for (size_t d = 0; d < sizes.size(); d++) place += index[d] * strides[d];
      function(place);
      size_t d = sizes.size();
      while (d > 0 && ++index[d - 1] == sizes[d - 1]) index[--d] = 0;
      if (d == 0) return;
    }
  }

  bool overlaps(const Region& other) const {
    auto first = std::max(begin, other.begin);
    auto last = std::min(end, other.end);
    if (first >= last) return false;
    if (is_dense() && other.is_dense()) return true;
    std::vector<bool> taken(last - first, false);
    each_item([&](uintptr_t place) {
      for (auto byte = place; byte < place + itemsize; byte++)
        if (byte >= first && byte < last) taken[byte - first] = true;
    });
    bool met = false;
    other.each_item([&](uintptr_t place) {
      for (auto byte = place; byte < place + other.itemsize; byte++)
        if (byte >= first && byte < last && taken[byte - first]) met = true;
    });
    return met;
  }

  bool covers(const Region& other) const { return is_dense() && begin <= other.begin && other.end <= end; }
};

struct Access {
  Region region;
  size_t stream;
  uint64_t time;
  bool writes;
  std::string what;
};

// The accesses of a block that later ones may yet race with.
class History {
 public:
  // Enters an access, and calls `race(earlier)` for each one that it is not ordered after.
  template <class Function>
  void enter(Access access, const Clock& clock, const Clock& host, Function race) {
    auto is_over = [&](const Access& earlier) {
      // All that is launched from now on is ordered after what the host has waited for.
      if (host[earlier.stream] >= earlier.time) return true;
      if (earlier.stream != access.stream && (earlier.writes || access.writes) &&
          clock[earlier.stream] < earlier.time && earlier.region.overlaps(access.region))
        race(earlier);
      // What this access stands for from now on: a write for all before it, a read for its stream's reads.
      bool is_replaced = access.writes || (!earlier.writes && earlier.stream == access.stream);
      return is_replaced && access.region.covers(earlier.region);
    };
    accesses_.erase(std::remove_if(accesses_.begin(), accesses_.end(), is_over), accesses_.end());
    accesses_.push_back(std::move(access));
  }

  // Begins a life of the memory: it may be used from this access on.
  void begin(Access access) { accesses_.assign(1, std::move(access)); }

  const std::vector<Access>& accesses() const { return accesses_; }

 private:
  std::vector<Access> accesses_;
};

}  // namespace sim
