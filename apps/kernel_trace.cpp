#include "apps/kernel_trace.h"

#include <exception>
#include <filesystem>
#include <set>
#include <system_error>

#include <torch/csrc/autograd/profiler_kineto.h>

#include "twobp/core/check.h"

namespace twobp {

void trace_kernels(const std::string& path, bool on_gpu, const std::function<void()>& step) {
  using torch::profiler::impl::ActivityType;
  namespace profiler = torch::autograd::profiler;
  torch::profiler::impl::ExperimentalConfig more;
  more.profile_all_threads = true;  // the ranks' threads were started earlier
  const torch::profiler::impl::ProfilerConfig config(
      torch::profiler::impl::ProfilerState::KINETO, /*report_input_shapes=*/false, /*profile_memory=*/false,
      /*with_stack=*/false, /*with_flops=*/false, /*with_modules=*/false, more);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (on_gpu) activities.insert(ActivityType::CUDA);
  std::error_code no_file;
  std::filesystem::remove(path, no_file);  // the profiler does not report a file that it cannot write
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  std::exception_ptr error;
  try {
    step();
  } catch (...) {
    error = std::current_exception();
  }
  const auto result = profiler::disableProfiler();
  if (error) std::rethrow_exception(error);
  result->save(path);
  TWOBP_CHECK(std::filesystem::exists(path, no_file), "cannot write ", path, ": the profiler's trace of a step");
}

}  // namespace twobp
