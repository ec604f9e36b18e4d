// Graphs of the stand-in. As on a GPU, nothing runs during the recording.
#include <atomic>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "tests/nn/device/stand_in_device.h"
#include "tests/nn/device/stand_in_queues.h"
#include "twobp/nn/device/gpu.h"

namespace twobp::test {
namespace {

constexpr auto kGraphType = at::DeviceType::PrivateUse1;

std::atomic<int> replays_of_all = 0;

Stream& stream_here() {
  const c10::impl::VirtualGuardImpl guard(kGraphType);
  return stream_of(guard.getStream(guard.getDevice()));
}

class Graph : public WorkGraph {
 public:
  static std::unique_ptr<WorkGraph> record(const std::vector<at::Device>&, const std::function<void()>& work) {
    auto graph = std::make_unique<Graph>();
    graph->recording_ = begin_recording(stream_here());
    try {
      work();
    } catch (...) {
      try {
        end_recording(*graph->recording_);
      } catch (const c10::Error&) {
        // The error that ended the recording is the one to report.
      }
      throw;
    }
    end_recording(*graph->recording_);
    return graph;
  }
  void replay() override {
    ++replays_of_all;
    test::replay(*recording_, stream_here());
  }

 private:
  std::shared_ptr<Recording> recording_;
};

[[maybe_unused]] const bool records = (record_graphs_by(kGraphType, &Graph::record), true);

}  // namespace

int replays() {
  return replays_of_all;
}

}  // namespace twobp::test
