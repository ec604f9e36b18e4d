// pipeline.gradients: which stages stream their gradients (Pipeline::stream_gradients), that is, apply each of them as
// soon as it is complete, so that they never exist as a whole.
#pragma once

#include <string>
#include <vector>

namespace twobp {

class Pipeline;
struct Config;
struct Variant;

// Why every stage keeps its gradients until the end of a step under this configuration. Empty: they may be streamed.
std::string why_gradients_are_kept(const Config& config);

struct StreamedGradients {
  std::vector<bool> stages;  // empty: none
  std::string why;           // for readers; empty: the configuration says so
};

// Decides by the configuration. "auto" streams the stages of the fullest rank, and of more ranks, if the simulation
// says that this lowers the bytes of the fullest rank, and that a step takes hardly longer; a cap in bytes limits what
// streaming takes more of, so "auto" keeps then. `variant`: that of the steps with kept gradients. If pipeline.schedule
// is "auto" and stages stream, it becomes the named schedule that suits them best: the search is for kept gradients.
// `batch` as for profiled_costs. All processes call it and find the same. Throws Error if "streamed" does not fit the
// schedule.
StreamedGradients decide_gradients(const Config& config, const Pipeline& pipeline, Variant& variant, int micro_batches,
                                   const std::vector<double>& batch = {});

// "gradients: streamed by stages 0, 1".
std::string to_text(const StreamedGradients& gradients);

}  // namespace twobp
