// Collectives with NCCL's contract: of tensors of devices alone, in the order of their launches, on a stream of their
// own, without tags, and none returns before its turn has come on every rank.
//
// Bytes go over gloo, each time after a description of the call: ranks that call something else are told apart at
// once, and a rank that calls nothing is named when the time is up.
#pragma once
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unistd.h>

#include <thread>

#include "copies.h"

namespace sim {

using std::chrono::milliseconds;

// How long a collective may stay undone under `hostile` while nobody waits for it: other ranks may need it.
constexpr milliseconds PATIENCE{50};
constexpr size_t DESCRIPTION = 256;  // bytes
constexpr int64_t FIRST_OF_GROUPS = 1000;  // numbers of streams; those of the pool begin at 1

inline std::atomic<bool> is_ending{false};

// -- A thread for each stream of a group --------------------------------------------------------------------------

// In a program that does its work at once, what waited for other ranks is done as soon as they came.
inline void go_on() {
  if (is_late) return;
  std::vector<Stream*> all;
  {
    Held held(data);
    for (auto& [key, stream] : streams)
      if (!stream->queue.empty()) all.push_back(stream.get());
  }
  for (auto* stream : all) run_until(*stream, stream->launched, false);
}

// Runs what was launched on a stream, as the device itself would: at once, or late.
class Progress : public std::enable_shared_from_this<Progress> {
 public:
  explicit Progress(Stream& stream) : stream_(stream) {}

  void start() {
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }

  // Says that work was launched, or that the host waits for all of it.
  void notify(bool is_awaited) {
    std::lock_guard<std::mutex> held(lock_);
    is_awaited_ = is_awaited_ || is_awaited;
    has_work_ = true;
    changed_.notify_all();
  }

  // Lets the thread end, once it has done what there is.
  void end() {
    std::lock_guard<std::mutex> held(lock_);
    is_over_ = is_awaited_ = true;
    changed_.notify_all();
  }

 private:
  void run() {
    std::unique_lock<std::mutex> held(lock_);
    while (!is_ending) {
      changed_.wait(held, [this] { return has_work_ || is_over_; });
      if (is_late) changed_.wait_for(held, PATIENCE, [this] { return is_awaited_; });
      bool is_last = is_over_;
      has_work_ = is_awaited_ = false;
      held.unlock();
      if (!is_ending) {
        run_all(stream_);
        go_on();
      }
      if (is_last) return;
      held.lock();
    }
  }

  Stream& stream_;
  std::mutex lock_;
  std::condition_variable changed_;
  bool has_work_ = false;
  bool is_awaited_ = false;
  bool is_over_ = false;
};

// -- What goes from rank to rank ----------------------------------------------------------------------------------

inline Tensor bytes_view(const Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), {int64_t(tensor.nbytes())}, at::TensorOptions(at::kByte));
}

inline std::string text_of(const Tensor& tensor) {
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << tensor.sizes();
  return text.str();
}

inline std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

using Sizes = std::vector<int64_t>;

struct Wire {
  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  std::string name;
  milliseconds timeout;
  std::mutex lock;  // of the store, which threads share

  static std::string key(int rank) { return "the last call of rank " + std::to_string(rank); }

  // Lets the others read what this rank does, if it never comes to what they do.
  void tell(const std::string& call) {
    std::lock_guard<std::mutex> held(lock);
    store->set(key(rank), std::vector<uint8_t>(call.begin(), call.end()));
  }

  std::string last_calls() {
    std::lock_guard<std::mutex> held(lock);
    std::string text;
    for (int other = 0; other < size; other++) {
      std::string call = "nothing yet";
      if (store->check({key(other)})) {
        auto bytes = store->get(key(other));
        call.assign(bytes.begin(), bytes.end());
      }
      text += "\n  rank " + std::to_string(other) + ": " + call;
    }
    return text;
  }

  // The bytes of every rank.  # (ranks, bytes)
  Tensor gather(const Tensor& mine) {
    auto all = at::empty({size, mine.numel()}, at::TensorOptions(at::kByte));
    if (mine.numel() == 0) return all;
    std::vector<std::vector<Tensor>> outputs{all.unbind()};
    std::vector<Tensor> inputs{mine};
    c10d::AllgatherOptions options;
    options.timeout = timeout;
    gloo->allgather(outputs, inputs, options)->wait();
    return all;
  }

  // Sends a part of bytes to every rank.
  void exchange(Tensor to, Tensor from, Sizes received, Sizes sent) {
    c10d::AllToAllOptions options;
    options.timeout = timeout;
    gloo->alltoall_base(to, from, received, sent, options)->wait();
  }

  // Compares what all ranks call, on what device, and how many bytes each sends to each.
  void agree(const std::string& call, int device, const Sizes& sent, const Sizes& received) {
    int64_t numbers = 2 * size * sizeof(int64_t);
    auto mine = at::zeros({int64_t(2 * DESCRIPTION) + numbers}, at::TensorOptions(at::kByte));
    auto* begin = static_cast<char*>(mine.data_ptr());
    std::strncpy(begin, call.c_str(), DESCRIPTION - 1);
    auto place = "sim:" + std::to_string(device) + " of " + host_name();
    std::strncpy(begin + DESCRIPTION, place.c_str(), DESCRIPTION - 1);
    auto* counts = reinterpret_cast<int64_t*>(begin + 2 * DESCRIPTION);
    if (!sent.empty()) {
      std::copy(sent.begin(), sent.end(), counts);
      std::copy(received.begin(), received.end(), counts + size);
    }
    auto all = gather(mine);
    auto of = [&](int other) { return static_cast<const char*>(all[other].data_ptr()); };
    auto sends = [&](int from, int to) { return reinterpret_cast<const int64_t*>(of(from) + 2 * DESCRIPTION)[to]; };
    bool is_one_call = true;
    for (int other = 0; other < size; other++) {
      is_one_call = is_one_call && std::string(of(other)) == call.substr(0, DESCRIPTION - 1);
      is_one_call = is_one_call && sends(other, rank) == sends(rank, size + other);
      is_one_call = is_one_call && sends(rank, other) == sends(other, size + rank);
      TORCH_CHECK_WITH(
          DistBackendError, other == rank || place != of(other) + DESCRIPTION, "Duplicate device detected: rank ",
          rank, " and rank ", other, " both use ", place,
          ". Call torch.accelerator.set_device_index(local_rank) before the first collective");
    }
    if (is_one_call) return;
    std::ostringstream text;
    text << "the ranks of group " << name << " do not call the same:";
    for (int other = 0; other < size; other++) text << "\n  rank " << other << ": " << of(other);
    if (!sent.empty()) text << "\nWhere these are equal, a rank expects other sizes than those that are sent to it.";
    TORCH_CHECK_WITH(DistBackendError, false, text.str());
  }
};

// Adds up, or what else the operation does, in the order of ranks.
inline Tensor reduced(const std::vector<Tensor>& parts, c10d::ReduceOp::RedOpType op) {
  using Op = c10d::ReduceOp;
  auto total = parts[0].clone();
  bool is_bool = total.scalar_type() == at::kBool;
  for (size_t i = 1; i < parts.size(); i++) {
    switch (op) {
      case Op::SUM:
      case Op::AVG:
        is_bool ? total.logical_or_(parts[i]) : total.add_(parts[i]);
        break;
      case Op::PRODUCT:
        is_bool ? total.logical_and_(parts[i]) : total.mul_(parts[i]);
        break;
      case Op::MIN:
        total = at::minimum(total, parts[i]);
        break;
      default:
        total = at::maximum(total, parts[i]);
    }
  }
  auto count = int64_t(parts.size());
  if (op == Op::AVG) at::isIntegralType(total.scalar_type(), false) ? total.div_(count, "trunc") : total.div_(count);
  return total;
}

inline std::string name_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return "sum";
    case c10d::ReduceOp::AVG: return "avg";
    case c10d::ReduceOp::PRODUCT: return "product";
    case c10d::ReduceOp::MIN: return "min";
    case c10d::ReduceOp::MAX: return "max";
    default:
      TORCH_CHECK(
          false, "simccl sums, averages, multiplies, and takes the least or the greatest: NCCL has no bitwise "
          "operations, and its sum with a factor is not simulated");
  }
}

// Fills each target with the bytes of a rank.
inline void fill_each(const std::vector<Tensor>& targets, const Tensor& all) {
  for (size_t i = 0; i < targets.size(); i++) {
    auto part = at::empty(targets[i].sizes(), targets[i].options());
    if (part.nbytes()) std::memcpy(part.data_ptr(), all[i].data_ptr(), part.nbytes());
    targets[i].copy_(part);
  }
}

inline std::vector<Tensor> like(const Tensor& tensor, const Tensor& all) {
  std::vector<Tensor> parts;
  for (int64_t i = 0; i < all.size(0); i++) parts.push_back(at::empty(tensor.sizes(), tensor.options()));
  fill_each(parts, all);
  return parts;
}

// -- Calls ------------------------------------------------------------------------------------------------------

// One call, or one of those that are launched as one.
struct Part {
  std::string text;
  std::vector<Tensor> read, written;  // of the device
  std::function<void(Wire&)> run;     // what all ranks do together; none for a message
  std::vector<int64_t> sent, received;
  // Of a message from one rank to another:
  int peer = -1;
  bool is_send = false;
  std::string shape;
  Tensor content;
};

struct Launched {
  std::string what;
  Stream* stream = nullptr;
  uint64_t position = 0;
  Clock clock;
  std::vector<Tensor> kept;  // until somebody waits: memory that is freed before may be another tensor's
};

class SimWork final : public c10d::Work {
 public:
  SimWork(
      std::shared_ptr<Wire> wire, std::shared_ptr<Launched> launched, std::vector<Tensor> results,
      std::shared_ptr<Progress> progress, bool is_barrier)
      : Work(wire->rank),
        wire_(std::move(wire)),
        launched_(std::move(launched)),
        results_(std::move(results)),
        progress_(std::move(progress)),
        is_barrier_(is_barrier) {
    auto device = c10::Device(TYPE, launched_->stream->device);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    // What waits for the future waits for the stream of the group.
    c10::StreamGuard guard(as_torch(device.index(), launched_->stream->id));
    future_->markCompleted(c10::IValue(results_));
  }

  void synchronize() override {
    auto& stream = *launched_->stream;
    wait_for(current_stream(stream.device), stream, launched_->position, launched_->clock);
    Held held(data);
    launched_->kept.clear();
  }

  // As NCCL's: the host waits for a barrier, and where it says how long.
  bool wait(milliseconds timeout = kNoTimeout) override {
    synchronize();
    bool is_limited = timeout != kNoTimeout;
    if (is_limited || is_barrier_) wait_on_host(is_limited ? timeout : std::chrono::hours(24));
    return true;
  }

  bool isCompleted() override {
    auto& stream = *launched_->stream;
    return query(stream, launched_->position, launched_->clock) || !devices[stream.device].failure.empty();
  }
  bool isSuccess() const override { return devices[launched_->stream->device].failure.empty(); }
  std::vector<Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  void wait_on_host(milliseconds timeout) {
    auto& stream = *launched_->stream;
    count("synchronizations");
    progress_->notify(true);
    WithoutGil no_gil;
    auto end = std::chrono::steady_clock::now() + timeout;
    bool is_over = false;
    std::unique_lock<std::mutex> running(engine);
    while (std::chrono::steady_clock::now() < end) {
      {
        Held held(data);
        is_over = stream.done >= launched_->position;
      }
      if (is_over) break;
      work_is_done.wait_for(running, PATIENCE);
    }
    running.unlock();
    check_usable(stream.device);
    TORCH_CHECK_WITH(
        DistBackendError, is_over, launched_->what, " of group ", wire_->name, " was not done after ", timeout.count(),
        " ms. The last calls are:", wire_->last_calls());
    Held held(data);
    host.merge(launched_->clock);
  }

  std::shared_ptr<Wire> wire_;
  std::shared_ptr<Launched> launched_;
  std::vector<Tensor> results_;
  std::shared_ptr<Progress> progress_;
  bool is_barrier_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// -- The group ----------------------------------------------------------------------------------------------------

// `override` is left out below: releases of torch have other names for some of these, and some names of old.
class Group final : public c10d::Backend {
 public:
  using Tensors = std::vector<Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  Group(
      c10::intrusive_ptr<c10d::Backend> gloo, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
      std::string name, milliseconds timeout)
      : Backend(rank, size), wire_(std::make_shared<Wire>()) {
    wire_->gloo = std::move(gloo);
    // With a connection of its own: another thread may wait for a key in the caller's for as long as it likes.
    wire_->store = store->clone();
    wire_->rank = rank;
    wire_->size = size;
    wire_->name = std::move(name);
    wire_->timeout = timeout;
  }

  const std::string getBackendName() const { return "simccl"; }
  bool supportsCoalescing() const { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() { return c10::make_intrusive<Options>("simccl", wire_->timeout); }
  void setTimeout(milliseconds timeout) { wire_->timeout = timeout; }
  void setSequenceNumberForGroup() {}
  uint64_t getSequenceNumberForGroup() { return calls_; }

  void startCoalescing() {
    TORCH_CHECK(!is_coalescing_, "startCoalescing was called twice");
    is_coalescing_ = true;
  }

  WorkPtr endCoalescing() {
    is_coalescing_ = false;
    auto parts = std::move(coalesced_);
    coalesced_.clear();
    if (parts.empty()) return {};
    bool has_messages = false, has_collectives = false;
    for (auto& part : parts) (part.peer >= 0 ? has_messages : has_collectives) = true;
    TORCH_CHECK(!has_messages || !has_collectives, "messages and collectives cannot be launched as one");
    return launch(std::move(parts), true, has_messages ? Kind::batch : Kind::plain);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
    auto& tensor = one(tensors);
    auto root = options.rootRank;
    bool is_root = root == getRank();
    Part part{"broadcast(" + text_of(tensor) + ", from " + std::to_string(root) + ")"};
    (is_root ? part.read : part.written).push_back(tensor);
    part.run = [=, host = on_host(tensor)](Wire& wire) {
      auto dense = host.contiguous();
      auto all = wire.gather(bytes_view(dense));
      if (!is_root) fill_each({host}, all.narrow(0, root, 1));
    };
    return submit(std::move(part), options.asyncOp);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
    return submit(reduction("all_reduce", one(tensors), options.reduceOp, -1), options.asyncOp);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
    std::vector<Part> parts;
    for (auto& tensor : tensors) parts.push_back(reduction("all_reduce", checked(tensor), options.reduceOp, -1));
    return submit(std::move(parts), options.asyncOp);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
    return submit(reduction("reduce", one(tensors), options.reduceOp, options.rootRank), options.asyncOp);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
    TORCH_CHECK(outputs.size() == 1, "expected one list of outputs, and not ", outputs.size());
    return submit(gathering("all_gather", outputs[0], one(inputs)), options.asyncOp);
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
    return submit(gathering("all_gather_into_tensor", {output}, checked(input)), options.asyncOp);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
    std::vector<Part> parts;
    for (size_t i = 0; i < inputs.size(); i++)
      parts.push_back(gathering("all_gather_into_tensor", {outputs[i]}, checked(inputs[i])));
    return submit(std::move(parts), options.asyncOp);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
    auto& input = one(inputs);
    bool is_root = options.rootRank == getRank();
    auto part = gathering("gather", is_root ? outputs.at(0) : Tensors(), input);
    part.text += " to " + std::to_string(options.rootRank);
    return submit(std::move(part), options.asyncOp);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
    auto& output = one(outputs);
    bool is_root = options.rootRank == getRank();
    Part part{"scatter(" + text_of(output) + ", from " + std::to_string(options.rootRank) + ")"};
    if (is_root) part.read = same(inputs.at(0), output);
    part.written.push_back(output);
    part.run = [=, root = options.rootRank, target = on_host(output), sources = hosts(part.read)](Wire& wire) {
      auto nbytes = int64_t(target.nbytes());
      auto mine = is_root ? joined(sources) : at::zeros({nbytes * wire.size}, at::kByte);
      auto all = wire.gather(mine);
      fill_each({target}, all[root].view({wire.size, nbytes}).narrow(0, wire.rank, 1));
    };
    return submit(std::move(part), options.asyncOp);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
    TORCH_CHECK(inputs.size() == 1, "expected one list of inputs, and not ", inputs.size());
    auto& output = one(outputs);
    return submit(scattering("reduce_scatter", output, same(inputs[0], output), options.reduceOp), options.asyncOp);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
    return submit(scattering("reduce_scatter_tensor", checked(output), {input}, options.reduceOp), options.asyncOp);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
    std::vector<Part> parts;
    for (size_t i = 0; i < inputs.size(); i++)
      parts.push_back(scattering("reduce_scatter_tensor", checked(outputs[i]), {inputs[i]}, options.reduceOp));
    return submit(std::move(parts), options.asyncOp);
  }

  WorkPtr alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& options) {
    checked(output), checked(input);
    Part part{"all_to_all_single(" + std::string(c10::toString(input.scalar_type())) + ")"};
    part.sent = in_bytes(input, from_sizes);
    part.received = in_bytes(output, to_sizes);
    part.read.push_back(input);
    part.written.push_back(output);
    part.run = [target = on_host(output), source = on_host(input), sent = part.sent,
                received = part.received](Wire& wire) {
      wire.exchange(bytes_view(target), bytes_view(source), received, sent);
    };
    return submit(std::move(part), options.asyncOp);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
    Part part{"all_to_all(" + std::string(c10::toString(inputs.at(0).scalar_type())) + ")"};
    for (auto& tensor : inputs) part.sent.push_back(checked(tensor).nbytes());
    for (auto& tensor : outputs) part.received.push_back(checked(tensor).nbytes());
    part.read = inputs;
    part.written = outputs;
    part.run = [targets = hosts(outputs), sources = hosts(inputs), sent = part.sent,
                received = part.received](Wire& wire) {
      int64_t whole = 0;
      for (auto nbytes : received) whole += nbytes;
      auto all = at::empty({whole}, at::TensorOptions(at::kByte));
      wire.exchange(all, joined(sources), received, sent);
      auto* begin = static_cast<const char*>(all.data_ptr());
      for (auto& target : targets) {
        if (target.nbytes()) std::memcpy(target.data_ptr(), begin, target.nbytes());
        begin += target.nbytes();
      }
    };
    return submit(std::move(part), options.asyncOp);
  }

  // Tags are of no effect, as for NCCL: messages to a rank arrive in the order in which they are sent.
  WorkPtr send(Tensors& tensors, int to, int /*tag*/) { return message(one(tensors), to, true); }
  WorkPtr recv(Tensors& tensors, int from, int /*tag*/) { return message(one(tensors), from, false); }

  WorkPtr barrier(const c10d::BarrierOptions& options) {
    auto device = current_device;
    if (auto& named = options.device; named.has_value() && named->type() == TYPE && named->has_index())
      device = named->index();
    if (!options.device_ids.empty()) device = options.device_ids[0];
    c10::DeviceGuard guard(c10::Device(TYPE, device));
    auto tensor = at::empty({1}, at::TensorOptions(at::kFloat).device(c10::Device(TYPE, device))).zero_();
    auto part = reduction("barrier", tensor, c10d::ReduceOp::SUM, -1);
    return launch({std::move(part)}, options.asyncOp, Kind::barrier);
  }

  // Ends when all is done that was launched: other ranks may need it.
  void shutdown() {
    auto streams = end_threads();
    for (auto* stream : streams)
      if (devices[stream->device].failure.empty()) run_all(*stream);
  }
  void abort() { end_threads(); }
  ~Group() { end_threads(); }

 private:
  enum class Kind { plain, batch, barrier };

  static Tensor& checked(Tensor& tensor) {
    TORCH_CHECK(
        is_on_device(tensor), "simccl takes tensors of devices alone, as NCCL does, and not of ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
    return tensor;
  }
  static Tensor& one(Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "expected one tensor, and not ", tensors.size());
    return checked(tensors[0]);
  }
  Tensors same(Tensors& tensors, const Tensor& other) const {
    TORCH_CHECK(
        int(tensors.size()) == getSize(), "expected a tensor for each of ", getSize(), " ranks, and not ",
        tensors.size());
    for (auto& tensor : tensors)
      TORCH_CHECK(
          checked(tensor).sizes() == other.sizes() && tensor.scalar_type() == other.scalar_type(),
          "expected tensors of one shape and type, ", text_of(other), ", and not ", text_of(tensor));
    return tensors;
  }
  static Tensors hosts(const Tensors& tensors) {
    Tensors all;
    for (auto& tensor : tensors) all.push_back(on_host(tensor));
    return all;
  }
  // The bytes of tensors, one after the other.
  static Tensor joined(const Tensors& tensors) {
    Tensors all;
    for (auto& tensor : tensors) {
      auto dense = tensor.contiguous();
      all.push_back(bytes_view(dense).clone());
    }
    return at::cat(all);
  }
  std::vector<int64_t> in_bytes(const Tensor& tensor, const std::vector<int64_t>& sizes) const {
    auto rows = tensor.dim() ? tensor.size(0) : 0;
    if (sizes.empty()) {
      TORCH_CHECK(rows % getSize() == 0, "Tensor's dim 0 does not divide equally across group size");
      return std::vector<int64_t>(getSize(), tensor.nbytes() / getSize());
    }
    TORCH_CHECK(int(sizes.size()) == getSize(), "Number of tensor splits not equal to group size");
    std::vector<int64_t> nbytes;
    int64_t whole = 0;
    for (auto size : sizes) {
      whole += size;
      nbytes.push_back(rows ? size * int64_t(tensor.nbytes()) / rows : 0);
    }
    TORCH_CHECK(whole == rows, "Split sizes doesn't match total dim 0 size");
    return nbytes;
  }

  Part reduction(const std::string& name, const Tensor& tensor, const c10d::ReduceOp& op, int64_t root) {
    auto end = root < 0 ? ")" : ", to " + std::to_string(root) + ")";
    Part part{name + "(" + text_of(tensor) + ", " + name_of(op) + end};
    bool is_target = root < 0 || root == getRank();
    (is_target ? part.written : part.read).push_back(tensor);
    part.run = [is_target, host = on_host(tensor), kind = op.op_](Wire& wire) {
      auto dense = host.contiguous();
      auto all = wire.gather(bytes_view(dense));
      if (is_target) host.copy_(reduced(like(dense, all), kind));
    };
    return part;
  }

  // Into a tensor for each rank, one for all, or none.
  Part gathering(const std::string& name, Tensors outputs, const Tensor& input) {
    Part part{name + "(" + text_of(input) + ")"};
    if (outputs.size() == 1 && name == "all_gather_into_tensor") {
      TORCH_CHECK(
          checked(outputs[0]).numel() == input.numel() * getSize() && outputs[0].scalar_type() == input.scalar_type(),
          "output tensor size must be equal to world_size times input tensor size: ", text_of(outputs[0]), " and ",
          text_of(input));
    } else if (!outputs.empty()) {
      same(outputs, input);
    }
    part.read.push_back(input);
    part.written = outputs;
    part.run = [targets = hosts(outputs), source = on_host(input)](Wire& wire) {
      auto dense = source.contiguous();
      auto all = wire.gather(bytes_view(dense));
      if (targets.size() == 1) {
        std::memcpy(targets[0].data_ptr(), all.data_ptr(), all.nbytes());
      } else {
        fill_each(targets, all);
      }
    };
    return part;
  }

  // From a tensor for each rank, or one for all.
  Part scattering(const std::string& name, const Tensor& output, Tensors inputs, const c10d::ReduceOp& op) {
    Part part{name + "(" + text_of(output) + ", " + name_of(op) + ")"};
    if (name == "reduce_scatter_tensor")
      TORCH_CHECK(
          checked(inputs[0]).numel() == output.numel() * getSize() && inputs[0].scalar_type() == output.scalar_type(),
          "input tensor must be the same size as output size times world size: ", text_of(inputs[0]), " and ",
          text_of(output));
    part.read = inputs;
    part.written.push_back(output);
    part.run = [sources = hosts(inputs), target = on_host(output), kind = op.op_](Wire& wire) {
      auto nbytes = int64_t(target.nbytes());
      auto all = at::empty({wire.size, nbytes}, at::TensorOptions(at::kByte));
      std::vector<int64_t> sizes(wire.size, nbytes);
      if (nbytes) wire.exchange(all.view({-1}), joined(sources), sizes, sizes);
      target.copy_(reduced(like(target, all), kind));
    };
    return part;
  }

  WorkPtr message(const Tensor& tensor, int peer, bool is_send) {
    TORCH_CHECK(peer != getRank(), "a rank sends nothing to itself, and receives nothing from itself");
    auto shape = text_of(tensor);
    auto other = std::to_string(peer);
    Part part{is_send ? "send(" + shape + ", to " + other + ")" : "recv(" + shape + ", from " + other + ")"};
    (is_send ? part.read : part.written).push_back(tensor);
    part.peer = peer;
    part.is_send = is_send;
    part.shape = shape;
    part.content = bytes_view(on_host(tensor));
    return submit(std::move(part), true);
  }

  WorkPtr submit(Part part, bool is_async) {
    std::vector<Part> parts;
    parts.push_back(std::move(part));
    return submit(std::move(parts), is_async);
  }

  WorkPtr submit(std::vector<Part> parts, bool is_async) {
    if (!is_coalescing_) return launch(std::move(parts), is_async, Kind::plain);
    for (auto& part : parts) coalesced_.push_back(std::move(part));
    return c10::make_intrusive<c10d::Work>();  // what counts is the work of them all
  }

  // The stream of a group on a device. Messages outside of a batch have one for each other rank, as NCCL's do.
  std::pair<Stream*, std::shared_ptr<Progress>> stream_for(int device, int peer) {
    std::lock_guard<std::mutex> held(lock_);
    auto& [stream, progress] = streams_[{device, peer}];
    if (!stream) {
      static std::atomic<int64_t> next{FIRST_OF_GROUPS};
      stream = &stream_of(device, next++);
      progress = std::make_shared<Progress>(*stream);
      progress->start();
    }
    return {stream, progress};
  }

  std::vector<Stream*> end_threads() {
    std::lock_guard<std::mutex> held(lock_);
    std::vector<Stream*> ended;
    for (auto& [key, pair] : streams_) {
      pair.second->end();
      ended.push_back(pair.first);
    }
    streams_.clear();
    return ended;
  }

  WorkPtr launch(std::vector<Part> parts, bool is_async, Kind kind) {
    std::vector<Use> uses;
    auto launched = std::make_shared<Launched>();
    Tensors results;
    int device = -1;
    for (auto& part : parts) {
      for (bool writes : {false, true}) {
        for (auto& tensor : writes ? part.written : part.read) {
          TORCH_CHECK(
              device < 0 || device == tensor.device().index(), "all tensors of a collective have to be on one device");
          device = tensor.device().index();
          add_use(uses, tensor, writes);
          launched->kept.push_back(tensor.detach());
          if (writes) results.push_back(tensor);
        }
      }
      part.read.clear();
      part.written.clear();
    }
    check_usable(device);
    bool is_batch = kind == Kind::batch;
    auto [stream, progress] = stream_for(device, is_batch ? -1 : parts[0].peer);
    auto text = parts[0].text + (parts.size() > 1 ? " and " + std::to_string(parts.size() - 1) + " more" : "");
    launched->what = "call " + std::to_string(++calls_) + ", " + text;
    launched->stream = stream;
    wait_for(*stream, current_stream(device));
    enter(*stream, launch_time(*stream), text.substr(0, text.find('(')), std::move(uses));
    count("collectives");
    {
      Held held(data);
      stream->queue.push_back(
          {[wire = wire_, parts = std::move(parts), launched, is_batch] { run(*wire, parts, *launched, is_batch); },
           nullptr, 0, true});
      launched->position = ++stream->launched;
      launched->clock = clock_of(*stream);
    }
    auto work = c10::make_intrusive<SimWork>(wire_, launched, results, progress, kind == Kind::barrier);
    progress->notify(false);
    if (!is_async) work->wait();
    return work;
  }

  static void run(Wire& wire, const std::vector<Part>& parts, Launched& launched, bool is_batch) {
    wire.tell(launched.what);
    try {
      if (parts[0].peer >= 0) {
        pass_messages(wire, parts, is_batch);
      } else {
        for (auto& part : parts) {
          wire.agree(part.text, launched.stream->device, part.sent, part.received);
          part.run(wire);
        }
      }
    } catch (const c10::DistBackendError&) {
      throw;  // it says what is wrong
    } catch (const std::exception& error) {
      std::string text = error.what();
      TORCH_CHECK_WITH(
          DistBackendError, false, "rank ", wire.rank, " waited for the others in ", launched.what, " of group ",
          wire.name, ", at most ", wire.timeout.count(), " ms. The last calls are:", wire.last_calls(), "\n(",
          text.substr(0, text.find('\n')), ")");
    }
    Held held(data);
    // Whether or not anybody waits, later work of the group does not hold the memory back: torch's NCCL records no
    // streams, but keeps the tensors until a wait, or until the work is done.
    for (auto& tensor : launched.kept)
      Allocator::finish(tensor.storage().data_ptr().get(), *launched.stream, launched.position);
    launched.kept.clear();
  }

  // A message is passed when both sides have come, and each has said what it is.
  static void pass_messages(Wire& wire, const std::vector<Part>& parts, bool is_batch) {
    // Messages of a batch and others do not meet, as they are of other communicators with NCCL. There are three
    // kinds of each: what is sent, what its sender says of it, and what its receiver says.
    int first_tag = is_batch ? 3 : 0;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    auto begin = [&](Tensor bytes, int peer, bool is_sent, int kind) {
      Tensors one{std::move(bytes)};
      auto tag = first_tag + kind;
      works.push_back(is_sent ? wire.gloo->send(one, peer, tag) : wire.gloo->recv(one, peer, tag));
    };
    auto finish = [&] {
      for (auto& work : works) work->wait(wire.timeout);
      works.clear();
    };
    Tensors kept, others;
    for (auto& part : parts) {
      auto mine = at::zeros({int64_t(DESCRIPTION)}, at::TensorOptions(at::kByte));
      std::strncpy(static_cast<char*>(mine.data_ptr()), part.shape.c_str(), DESCRIPTION - 1);
      kept.push_back(mine);
      others.push_back(at::zeros_like(mine));
      begin(mine, part.peer, true, part.is_send ? 1 : 2);
      begin(others.back(), part.peer, false, part.is_send ? 2 : 1);
    }
    finish();
    for (size_t i = 0; i < parts.size(); i++) {
      std::string other(static_cast<const char*>(others[i].data_ptr()));
      TORCH_CHECK_WITH(
          DistBackendError, other == parts[i].shape, "rank ", wire.rank, " calls ", parts[i].text, ", and rank ",
          parts[i].peer, (parts[i].is_send ? " receives " : " sends "), other);
      if (parts[i].content.numel()) begin(parts[i].content, parts[i].peer, parts[i].is_send, 0);
    }
    finish();
  }

  std::shared_ptr<Wire> wire_;
  std::mutex lock_;
  std::map<std::pair<int, int>, std::pair<Stream*, std::shared_ptr<Progress>>> streams_;  // by device and peer
  std::atomic<uint64_t> calls_{0};
  bool is_coalescing_ = false;
  std::vector<Part> coalesced_;
};

}  // namespace sim
