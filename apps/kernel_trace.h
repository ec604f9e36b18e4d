// Writes a trace of the operators of a step, and on a GPU of its kernels, as LibTorch's profiler (Kineto, CUPTI)
// records them. It is in Chrome's trace format, for Perfetto. A rank's F, I and W are ranges of these names on its
// thread, unless the step is launched as a graph. Each kernel has its estimated occupancy of the multiprocessors.
#pragma once

#include <functional>
#include <string>

namespace twobp {

// Runs `step` and writes its trace. `on_gpu`: also records kernels, on all of this process's GPUs. Throws Error naming
// the file if it cannot be written.
void trace_kernels(const std::string& path, bool on_gpu, const std::function<void()>& step);

}  // namespace twobp
