#include "tests/nn/device/stand_in_queues.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include "tests/nn/device/stand_in_device.h"

namespace twobp::test {

struct Task {
  std::function<void()> work;
  std::function<bool()> ready;
};

class Stream {
 public:
  std::deque<Task> tasks;
  uint64_t rank = 0;    // drawn; 0: not yet
  bool runs = false;    // its first task
  bool joined = false;  // while it is recorded: another stream has waited for its last work
  Recording* recording = nullptr;
};

// The tasks of each stream. Each replay sets its points, and waits for them, anew.
struct Recording : std::enable_shared_from_this<Recording> {
  struct Node {
    Task task;
    std::shared_ptr<Point> sets, waits;
  };
  Stream* origin = nullptr;
  bool ended = false;
  std::vector<Stream*> streams;
  std::vector<std::pair<Stream*, Node>> nodes;
};

namespace {

// Of the streams that can go on, the one with the highest rank does, and ranks are seldom drawn anew. So streams get
// far ahead of each other.
constexpr int kOneInChanges = 50;
constexpr auto kPause = std::chrono::microseconds(50);

uint64_t seed() {
  const char* asked = std::getenv("TWOBP_STAND_IN_SEED");
  return asked == nullptr ? 1 : std::strtoull(asked, nullptr, 10);
}

// It lives until the program ends, because threads may outlive main().
struct Queues {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, c10::StreamId>, std::unique_ptr<Stream>> streams;
  std::vector<std::shared_ptr<Stream>> replayed;  // without the ones that are done
  std::vector<Stream*> busy;                      // with tasks
  std::mt19937_64 random{seed()};
  std::exception_ptr error;
};

Queues& queues() {
  static auto* queues = new Queues;
  return *queues;
}

void push(Queues& all, Stream& stream, Task task) {
  if (stream.tasks.empty()) all.busy.push_back(&stream);
  stream.tasks.push_back(std::move(task));
}

// A device's sums do not depend on the host thread that waits for them. The kernels of a CPU divide some sums among a
// thread's helpers, of which each host thread may have another number.
class OneThread {
 public:
  OneThread() {
    if (before_ != 1) at::set_num_threads(1);
  }
  ~OneThread() {
    if (before_ != 1) at::set_num_threads(before_);
  }

 private:
  int before_ = at::get_num_threads();
};

// Runs one task, if one can run now. The lock is released meanwhile.
bool run_one(Queues& all, std::unique_lock<std::mutex>& lock) {
  std::vector<Stream*> able;
  for (Stream* stream : all.busy) {
    const Task& first = stream->tasks.front();
    if (!stream->runs && (!first.ready || first.ready())) able.push_back(stream);
  }
  if (able.empty()) return false;
  if (all.random() % kOneInChanges == 0) able[all.random() % able.size()]->rank = 0;
  for (Stream* stream : able) {
    if (stream->rank == 0) stream->rank = all.random();
  }
  Stream* const next =
      *std::max_element(able.begin(), able.end(), [](const Stream* a, const Stream* b) { return a->rank < b->rank; });
  next->runs = true;
  Task task = std::move(next->tasks.front());
  lock.unlock();
  std::exception_ptr error;
  {
    const OneThread one_thread;
    try {
      task.work();
    } catch (...) {
      error = std::current_exception();
    }
    task = {};
  }
  lock.lock();
  if (error && !all.error) all.error = error;
  next->runs = false;
  next->tasks.pop_front();
  if (next->tasks.empty()) {
    std::erase(all.busy, next);
    std::erase_if(all.replayed, [&](const auto& stream) { return stream.get() == next; });
  }
  all.changed.notify_all();
  return true;
}

template <typename Condition>
void run_until(const Condition& condition) {
  Queues& all = queues();
  std::unique_lock lock(all.mutex);
  while (!condition()) {
    if (!run_one(all, lock)) all.changed.wait_for(lock, kPause);
  }
  if (all.error) std::rethrow_exception(std::exchange(all.error, nullptr));
}

void run_a_little() {
  Queues& all = queues();
  std::unique_lock lock(all.mutex);
  for (uint64_t count = all.random() % 4; count > 0 && run_one(all, lock); --count) {
  }
}

void set(Point& point) {
  point.at = std::chrono::steady_clock::now();
  point.passed = true;
}

// Puts the task into the stream, or into its recording.
void add(Queues& all, Stream& stream, Recording::Node node) {
  if (stream.recording) {
    stream.joined = false;
    stream.recording->nodes.emplace_back(&stream, std::move(node));
  } else {
    push(all, stream, std::move(node.task));
  }
}

}  // namespace

Stream& stream_of(const c10::Stream& stream) {
  Queues& all = queues();
  const std::lock_guard lock(all.mutex);
  auto& found = all.streams[{stream.device_index(), stream.id()}];
  if (!found) found = std::make_unique<Stream>();
  return *found;
}

void enqueue(Stream& stream, std::function<void()> work, std::function<bool()> ready) {
  Queues& all = queues();
  const std::lock_guard lock(all.mutex);
  add(all, stream, {{std::move(work), std::move(ready)}, nullptr, nullptr});
}

std::shared_ptr<Point> record_point(Stream& stream) {
  Queues& all = queues();
  const std::lock_guard lock(all.mutex);
  auto point = std::make_shared<Point>();
  if (stream.recording) {
    point->is_recorded = true;
    point->recording = stream.recording->weak_from_this();
  }
  add(all, stream, {{[point] { set(*point); }, nullptr}, point, nullptr});
  return point;
}

void wait_for_point(Stream& stream, const std::shared_ptr<Point>& point) {
  Queues& all = queues();
  const std::lock_guard lock(all.mutex);
  const std::shared_ptr<Recording> recording = point->recording.lock();
  TORCH_CHECK(!point->is_recorded || (recording && !recording->ended), "a recording ends, and a stream waits for it");
  TORCH_CHECK(recording || !stream.recording, "a stream that is recorded waits for one that is not");
  if (recording && !stream.recording) {
    stream.recording = recording.get();
    recording->streams.push_back(&stream);
  }
  TORCH_CHECK(stream.recording == recording.get(), "a stream waits for another recording");
  add(all, stream, {{[] {}, [point] { return point->passed.load(); }}, nullptr, point});
  if (!recording) return;
  for (const auto& [other, node] : recording->nodes) {
    if (node.sets == point && other != &stream) other->joined = true;
  }
}

void wait_on_host(const Point& point) {
  TORCH_CHECK(!point.is_recorded, "the host waits for what is recorded");
  run_until([&] { return point.passed.load(); });
}

void wait_on_host(Stream& stream) {
  TORCH_CHECK(!recording_of(stream), "the host waits for a stream that is recorded");
  wait_on_host(*record_point(stream));
}

bool has_passed(const Point& point) {
  TORCH_CHECK(!point.is_recorded, "the host asks about what is recorded");
  run_a_little();
  return point.passed;
}

bool is_idle(Stream& stream) {
  run_a_little();
  const std::lock_guard lock(queues().mutex);
  return stream.tasks.empty();
}

std::shared_ptr<Recording> begin_recording(Stream& stream) {
  const std::lock_guard lock(queues().mutex);
  TORCH_CHECK(!stream.recording, "the stream is recorded already");
  auto recording = std::make_shared<Recording>();
  recording->origin = &stream;
  recording->streams.push_back(&stream);
  stream.recording = recording.get();
  return recording;
}

void end_recording(Recording& recording) {
  const std::lock_guard lock(queues().mutex);
  recording.ended = true;
  bool joined = true;
  for (Stream* stream : recording.streams) {
    joined = joined && (stream->joined || stream == recording.origin);
    stream->recording = nullptr;
  }
  TORCH_CHECK(joined, "nothing waits for a stream that is recorded");
}

void replay(const Recording& recording, Stream& stream) {
  Queues& all = queues();
  const std::lock_guard lock(all.mutex);
  std::map<const Stream*, std::shared_ptr<Stream>> streams;
  std::map<const Point*, std::shared_ptr<Point>> points;
  const auto point_of = [&](const Point* recorded) {
    auto& point = points[recorded];
    if (!point) point = std::make_shared<Point>();
    return point;
  };
  const auto begin = std::make_shared<Point>();
  push(all, stream, {[begin] { set(*begin); }, nullptr});
  for (Stream* recorded : recording.streams) {
    auto& of = streams[recorded] = std::make_shared<Stream>();
    all.replayed.push_back(of);
    push(all, *of, {[] {}, [begin] { return begin->passed.load(); }});
  }
  for (const auto& [recorded, node] : recording.nodes) {
    Task task = node.task;
    if (node.sets) task.work = [point = point_of(node.sets.get())] { set(*point); };
    if (node.waits) task.ready = [point = point_of(node.waits.get())] { return point->passed.load(); };
    push(all, *streams[recorded], std::move(task));
  }
  for (const auto& [recorded, of] : streams) {
    const auto end = std::make_shared<Point>();
    push(all, *of, {[end] { set(*end); }, nullptr});
    push(all, stream, {[] {}, [end] { return end->passed.load(); }});
  }
}

Recording* recording_of(Stream& stream) {
  const std::lock_guard lock(queues().mutex);
  return stream.recording;
}

void put(void* native_stream, std::function<void()> work) {
  enqueue(*static_cast<Stream*>(native_stream), std::move(work));
}

void hold(void* native_stream, std::function<bool()> ready) {
  enqueue(
      *static_cast<Stream*>(native_stream), [] {}, std::move(ready));
}

void put(const DeviceStream& stream, std::function<void()> work) {
  put(stream.native(), std::move(work));
}

void hold(const DeviceStream& stream, std::function<bool()> ready) {
  hold(stream.native(), std::move(ready));
}

void let_run() {
  Queues& all = queues();
  std::unique_lock lock(all.mutex);
  while (run_one(all, lock)) {
  }
}

}  // namespace twobp::test
