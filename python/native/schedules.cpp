// Schedules for Python: named ones, their instructions as data, simulation and pictures. No torch.
#include <algorithm>
#include <optional>
#include <pybind11/stl.h>
#include <string>
#include <utility>
#include <vector>

#include "python/native/module.h"
#include "twobp/core/check.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/csv.h"
#include "twobp/schedule/draw/svg.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/schedule_source.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::python {
namespace {

// One row for all micro-batches, or one for each. A row has one number for all stages, or one for each.
using Costs = std::vector<std::vector<double>>;

double cost_of(const char* name, const Costs& costs, size_t row, size_t rows, int stage, int stages) {
  TWOBP_CHECK(costs.size() == 1 || costs.size() == rows, name, " has ", costs.size(), " lists, but another cost has ",
              rows, ": give one list for each micro-batch, or one number");
  const std::vector<double>& of_stages = costs[costs.size() == 1 ? 0 : row];
  TWOBP_CHECK(of_stages.size() == 1 || static_cast<int>(of_stages.size()) == stages, name, " has ", of_stages.size(),
              " numbers, but the schedule has ", stages, " stages: give one number, or one for each stage");
  return of_stages[of_stages.size() == 1 ? 0 : static_cast<size_t>(stage)];
}

// A schedule ready to run, and the same work without 2BP, which gives the cap `auto`.
struct Made {
  Schedule schedule;
  Schedule standard;
};

struct Simulated {
  Schedule schedule;
  Simulation simulation;
};

Made make(const ScheduleSource& source, std::optional<int> stages, std::optional<int> ranks,
          std::optional<int> micro_batches, const std::optional<std::string>& p2, int slices) {
  const P2Policy policy = p2 ? parse_policy(*p2) : source.default_policy();
  const auto placed = source.rank_of_stage(stages.value_or(0), ranks.value_or(0));
  const auto all = static_cast<int>(placed.size());
  int count = 0;
  for (const int rank : placed) count = std::max(count, rank + 1);
  const int each = micro_batches.value_or(source.default_micro_batches(all, count));
  return {source.make(all, count, each, policy, slices), source.make(all, count, each, P2Policy::kOff, slices)};
}

double most_held(const Simulation& simulation) {
  double most = 0;
  for (const RankSimulation& rank : simulation.ranks) most = std::max(most, rank.peak_bytes);
  return most;
}

// cap 0: none; no cap: that of training, the peak of the fullest rank without 2BP.
Simulated run(const Made& made, const Costs& forward, const Costs& backward_p1, const Costs& backward_p2, int p2_units,
              double latency, std::optional<double> cap) {
  const Schedule& schedule = made.schedule;
  const size_t rows = std::max({forward.size(), backward_p1.size(), backward_p2.size()});
  std::vector<StageCost> costs;
  for (size_t row = 0; row < rows; ++row) {
    for (int stage = 0; stage < schedule.stages; ++stage) {
      StageCost& cost = costs.emplace_back();
      cost.forward = cost_of("forward", forward, row, rows, stage, schedule.stages);
      cost.backward_p1 = cost_of("backward_p1", backward_p1, row, rows, stage, schedule.stages);
      cost.backward_p2 = cost_of("backward_p2", backward_p2, row, rows, stage, schedule.stages);
      cost.p2_units = p2_units;
    }
  }
  SimulationOptions options;
  options.message_seconds = latency;
  const double most = cap ? *cap : most_held(simulate(made.standard, costs, options));
  if (most > 0) options.cap_per_rank.assign(schedule.ranks.size(), most);
  return {schedule, simulate(schedule, costs, options)};
}

}  // namespace

void add_schedules(py::module_& module) {
  module.def("schedule_names", &schedule_names);
  module.def(
      "make_schedule",
      [](const std::string& name, std::optional<int> stages, std::optional<int> ranks, std::optional<int> micro_batches,
         const std::optional<std::string>& p2,
         int slices) { return make(ScheduleSource(name), stages, ranks, micro_batches, p2, slices); },
      py::arg("name"), py::arg("stages") = py::none(), py::arg("ranks") = py::none(),
      py::arg("micro_batches") = py::none(), py::arg("p2") = py::none(), py::arg("slices") = 1);
  module.def(
      "schedule_from_csv",
      [](const std::string& text, const std::string& name, const std::optional<std::string>& p2) {
        return make(ScheduleSource(from_csv(text, name)), {}, {}, {}, p2, 1);
      },
      py::arg("text"), py::arg("name"), py::arg("p2") = py::none());

  py::class_<Made>(module, "Schedule")
      .def_property_readonly("name", [](const Made& s) { return s.schedule.name; })
      .def_property_readonly("p2", [](const Made& s) { return std::string(policy_name(s.schedule.policy)); })
      .def_property_readonly("stages", [](const Made& s) { return s.schedule.stages; })
      .def_property_readonly("micro_batches",
                             [](const Made& s) { return s.schedule.micro_batches / s.schedule.slices; })
      .def_property_readonly("slices", [](const Made& s) { return s.schedule.slices; })
      .def_property_readonly("rank_of_stage", [](const Made& s) { return s.schedule.rank_of_stage; })
      .def("instructions",
           [](const Made& s) {
             std::vector<std::vector<std::tuple<std::string, int, int, int>>> ranks;
             for (const auto& rank : s.schedule.ranks) {
               auto& list = ranks.emplace_back();
               for (const Instruction& one : rank)
                 list.emplace_back(std::string(op_name(one.op)), one.stage, one.micro_batch, one.count);
             }
             return ranks;
           })
      .def("validate", [](const Made& s) { validate(s.schedule); })
      .def("simulate", &run)
      .def("csv", [](const Made& s) { return to_csv(s.schedule); });

  py::class_<Simulated>(module, "Simulation")
      .def_property_readonly("step", [](const Simulated& s) { return s.simulation.step_seconds; })
      .def_property_readonly("bubble", [](const Simulated& s) { return s.simulation.bubble_ratio(); })
      .def_property_readonly("peak", [](const Simulated& s) { return most_held(s.simulation); })
      .def_property_readonly("idle",
                             [](const Simulated& s) {
                               std::vector<double> idle;
                               for (int r = 0; r < s.schedule.rank_count(); ++r)
                                 idle.push_back(s.simulation.idle_fraction(r));
                               return idle;
                             })
      .def("timeline",
           [](const Simulated& s) {
             std::vector<std::vector<std::tuple<std::string, int, int, double, double>>> ranks;
             for (const auto& rank : s.simulation.ranks) {
               auto& list = ranks.emplace_back();
               for (const SimulatedOp& op : rank.timeline)
                 list.emplace_back(std::string(op_name(op.op)), op.stage, op.micro_batch, op.begin, op.end);
             }
             return ranks;
           })
      .def("grid", [](const Simulated& s, double unit) { return draw_grid(s.schedule, s.simulation, unit); })
      .def("csv", [](const Simulated& s) { return to_csv(lower(s.schedule, s.simulation)); })
      .def("svg", [](const Simulated& s, const std::string& title, int width, double until) {
        SvgOptions options;
        options.title = title;
        options.width = width;
        options.until = until;
        return draw_svg(s.schedule, s.simulation, options);
      });
}

}  // namespace twobp::python
