// The stand-in's streams and events. All functions may be called from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include <c10/core/Stream.h>

namespace twobp::test {

class Stream;
struct Recording;

// A point in a stream's work.
struct Point {
  std::atomic<bool> passed{false};
  std::chrono::steady_clock::time_point at;
  bool is_recorded = false;  // then it never passes
  std::weak_ptr<Recording> recording;
};

Stream& stream_of(const c10::Stream& stream);

// `work` runs when everything before it in the stream is done and `ready`, if there is one, is true. While the stream
// is recorded, it is recorded.
void enqueue(Stream& stream, std::function<void()> work, std::function<bool()> ready = nullptr);
std::shared_ptr<Point> record_point(Stream& stream);
void wait_for_point(Stream& stream, const std::shared_ptr<Point>& point);

// Runs work until the point has passed, or all work of the stream is done. Both throw what work has thrown since the
// last call. It is an error to wait for, or ask about, what is recorded, as on a GPU.
void wait_on_host(const Point& point);
void wait_on_host(Stream& stream);
// Runs a little work, so that a caller who asks again and again makes progress.
bool has_passed(const Point& point);
bool is_idle(Stream& stream);

// Between these two calls, `stream` is recorded, and so is every stream that waits for a point of a recorded stream. It
// is an error if one of them waits for any other point, or if at the end nothing has waited for one of them.
std::shared_ptr<Recording> begin_recording(Stream& stream);
void end_recording(Recording& recording);
// Launches the recorded work in the stream, in as many streams as were recorded.
void replay(const Recording& recording, Stream& stream);
// The recording of the stream, or null.
Recording* recording_of(Stream& stream);

}  // namespace twobp::test
