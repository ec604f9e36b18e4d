// What a step runs, operator by operator and on a GPU kernel by kernel, as LibTorch's profiler (Kineto,
// CUPTI) records it: Chrome's trace format, for Perfetto. A rank's F, I and W are ranges of these names on
// its thread, unless the step is put in as a graph; a kernel has its estimated occupancy of the
// multiprocessors.
#pragma once

#include <functional>
#include <string>

namespace twobp {

// Runs `step` and writes its trace. `on_gpu`: kernels too, of all of this process's GPUs. Throws Error naming
// the file where it cannot be written.
void trace_kernels(const std::string& path, bool on_gpu, const std::function<void()>& step);

}  // namespace twobp
