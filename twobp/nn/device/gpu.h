// What needs CUDA's libraries, and is missing in a program built without them: parts of a GPU, graphs of its work, and
// what LibTorch's device-generic interface lacks.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

#include "twobp/nn/device/device.h"

namespace twobp {

class GpuParts {
 public:
  // Throws Error if `gpu` is not a GPU or is too small, the program was built without CUDA, or the driver does not
  // support parts.
  static std::shared_ptr<GpuParts> cut(c10::Device gpu, int parts);
  virtual ~GpuParts() = default;

  // Work that is launched in the stream runs on this part alone, at high priority. The stream lives as long as this
  // object.
  virtual c10::Stream make_stream(int part) = 0;
};

// Functions of a kind of device that ranks need and LibTorch's device-generic interface lacks.
struct DeviceFacts {
  std::string model;  // "NVIDIA H100 80GB HBM3"
  std::string id;     // unique to this device, whatever its index in this process is
};

struct DeviceSupport {
  // A stream that no other code gets until the program ends. LibTorch hands out its 32 streams of a priority in turn,
  // so the 33rd is the first again. A transfer that waits for its peer would then hold up computations.
  c10::Stream (*make_stream)(c10::Device device, bool high_priority);
  DeviceFacts (*facts)(c10::Device device);
  // Cuts the device into parts, as GpuParts::cut() does. Null if that is impossible.
  std::shared_ptr<GpuParts> (*cut)(c10::Device device, int parts) = nullptr;
};

// Ranks can compute on this kind of device. LibTorch's CUDA is built in.
void support_devices(c10::DeviceType type, const DeviceSupport& support);
// Throws Error for a kind that is not supported.
const DeviceSupport& device_support(c10::DeviceType type);
// The values of pipeline.device: "cpu", "cuda", and the others' names in LibTorch.
std::vector<std::string> device_names();

// Sets a variable that CUDA reads at its first use, unless it is set. A line on stderr, once, says if it has another
// value, and what follows from that.
void set_cuda_variable(const char* name, const std::string& value, const char* consequence);

// In a program without CUDA, these functions are never called.
DeviceSupport cuda_support();
// Of cuda_support().
std::shared_ptr<GpuParts> cut_cuda_gpu(c10::Device gpu, int parts);

// A CUDA graph: work for a device that is recorded once and then launched again as a whole.
class WorkGraph {
 public:
  virtual ~WorkGraph() = default;
  // Launches the recorded work in the current stream. It uses the same memory and the host values of the recording.
  virtual void replay() = 0;
};

// Records what `work` launches in the current stream, which must not be a device's default stream. Also recorded are
// other streams that wait for the current one and that it waits for in turn. They may belong to any thread and to any
// of `devices`. The devices are of one kind, and the first is the current one. Nothing runs during the recording, and
// the host may neither wait for the work nor copy anything to the device. The tensors that `work` uses, except those
// that it allocates, must live as long as the graph. `work` must have run once before, to initialize the libraries.
// Returns null if this program or this kind of device does not support graphs.
std::unique_ptr<WorkGraph> record_graph(const std::vector<at::Device>& devices, const std::function<void()>& work);

// Registers how devices of a kind record graphs. LibTorch's CUDA is built in.
using GraphRecorder = std::unique_ptr<WorkGraph> (*)(const std::vector<at::Device>& devices,
                                                     const std::function<void()>& work);
void record_graphs_by(at::DeviceType type, GraphRecorder recorder);

// Returns null in a program without CUDA.
std::unique_ptr<WorkGraph> record_cuda_graph(const std::vector<at::Device>& devices, const std::function<void()>& work);

}  // namespace twobp
