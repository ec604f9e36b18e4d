// The planner for Python: from a cost model to its table as data. No torch.
#include "twobp/plan/planner.h"

#include <pybind11/stl.h>
#include <string>
#include <vector>

#include "python/native/unlocked.h"
#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/schedule/csv.h"

namespace twobp::python {
namespace {

using Counts = std::vector<int>;
using Names = std::vector<std::string>;

double parse_size(const std::string& text) {
  if (text.empty()) return 0;
  const int64_t bytes = parse_bytes(text);
  TWOBP_CHECK(bytes > 0, "memory is '", text, "': write a size above 0, such as 80GiB, 512MiB or 1000000 (bytes)");
  return static_cast<double>(bytes);
}

py::dict to_dict(const PlanChoice& choice, const CostModel& model) {
  py::dict row;
  row["schedule"] = choice.schedule.name();
  row["p2"] = std::string(policy_name(choice.policy));
  row["ranks"] = choice.ranks;
  row["stages"] = choice.stages;
  row["frozen_stages"] = choice.frozen_stages;
  row["micro_batches"] = choice.micro_batches;
  row["micro_batch_size"] = choice.micro_batch_size;
  row["slices"] = choice.slices;
  row["slice_lengths"] = slice_lengths(model, choice.slices);
  row["recompute"] = choice.recompute;
  row["split"] = choice.split;
  row["step_seconds"] = choice.step_seconds;
  row["samples_per_second"] = choice.samples_per_second();
  row["idle"] = choice.bubble;
  row["peak_bytes"] = choice.peak_bytes;
  // The text form has no slices.
  const bool written = choice.found && choice.slices == 1;
  row["csv"] = written ? py::object(py::str(to_csv(*choice.found))) : py::none();
  return row;
}

py::tuple make_plan(const std::string& costs, const Counts& ranks, const Counts& micro_batches, const Names& schedules,
                    const Names& policies, const Names& recompute, const Counts& slices, const std::string& memory,
                    int batch, int top, bool search) {
  const CostModel model = parse_cost_model(costs, "the costs");
  PlanRequest request;
  request.ranks = ranks;
  request.micro_batches = micro_batches;
  request.schedules.assign(schedules.begin(), schedules.end());
  for (const std::string& name : policies) request.policies.push_back(parse_policy(name));
  request.recompute = recompute;
  request.slices = slices;
  request.memory = parse_size(memory);
  request.batch = batch;
  request.top = top;
  request.search = search;
  PlanResult result;
  {
    const WithoutGil free;
    result = plan(model, request);
  }
  if (result.best.empty()) {
    const PlanChoice& least = *result.smallest;
    fail("none of ", result.combinations, " combinations fits into ", memory,
         " per rank: the smallest memory that suffices is ", format_bytes(least.peak_bytes), ", with ",
         least.schedule.name(), ", p2 ", policy_name(least.policy), ", ", least.ranks, " ranks, ", least.micro_batches,
         " micro-batches", least.slices > 1 ? concat(" in ", least.slices, " slices") : "");
  }
  py::list rows;
  for (const PlanChoice& choice : result.best) rows.append(to_dict(choice, model));
  return py::make_tuple(rows, gain_text(result));
}

}  // namespace

void add_planner(py::module_& module) {
  module.def("plan", &make_plan);
  module.def("read_costs", [](const std::string& path) { return cost_model_to_json(read_cost_model(path)); });
}

}  // namespace twobp::python
