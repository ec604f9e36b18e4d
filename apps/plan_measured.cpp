#include "apps/plan_measured.h"

#include <iomanip>
#include <iostream>
#include <sstream>

#include <nlohmann/json.hpp>

#include "apps/plan_options.h"
#include "apps/table.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/schedule/draw/svg.h"
#include "twobp/trace/compare.h"
#include "twobp/trace/read_trace.h"
#include "twobp/trace/timeline.h"

namespace twobp {
namespace {

using Row = std::vector<std::string>;

std::string signed_text(double value, int digits, const char* unit) {
  std::ostringstream out;
  out << std::showpos << std::fixed << std::setprecision(digits) << value << unit;
  return out.str();
}

// Returns the error of the prediction, relative to the measured value.
std::string relative(const Compared& value) {
  return value.measured > 0 ? signed_text(100 * (value.predicted / value.measured - 1), 1, " %") : "-";
}

void print_tables(const Trace& trace, const Comparison& result) {
  const Schedule& schedule = trace.run->schedule;
  std::cout << printable(trace.title) << ": " << schedule.rank_count() << " ranks, " << schedule.count_text() << ", "
            << result.steps << (result.steps == 1 ? " step" : " steps") << "\n\n";
  std::vector<Row> rows = {{"", "predicted", "measured", "difference"}};
  rows.push_back({"step time", milliseconds(result.step_seconds.predicted), milliseconds(result.step_seconds.measured),
                  relative(result.step_seconds)});
  for (size_t rank = 0; rank < result.idle.size(); ++rank) {
    const Compared& idle = result.idle[rank];
    rows.push_back({concat("idle, rank ", rank), percent(idle.predicted), percent(idle.measured),
                    signed_text(100 * (idle.predicted - idle.measured), 1, " points")});
  }
  for (size_t rank = 0; rank < result.peak_bytes.size(); ++rank) {
    const Compared& bytes = result.peak_bytes[rank];
    const auto add = [&](const char* order, const Compared& of) {
      rows.push_back({concat("peak memory, rank ", rank, order), format_bytes(of.predicted), format_bytes(of.measured),
                      relative(of)});
    };
    add(result.replayed ? ", recorded W" : "", bytes);
    if (!result.replayed) continue;
    add(", simulated W", {result.simulation.ranks[rank].total_peak_bytes(), bytes.measured});
  }
  print_table(rows);
  std::cout << "\nTimes are predicted from the run's own means of F, I and W, and bytes from the profile "
               "before it.";
  std::cout << (result.replayed ? " Bytes are given with W in the recorded order, and with W as simulated, which "
                                  "--timeline and --svg draw.\n"
                                : "\n");

  const auto stages = static_cast<size_t>(schedule.stages);
  std::cout << "\nMean of one micro-batch" << (result.costs.size() > stages ? ", by slice" : "") << ", as measured:\n";
  std::vector<Row> costs = {{"stage", "F", "I", "W"}};
  for (size_t i = 0; i < result.costs.size(); ++i) {
    const StageCost& cost = result.costs[i];
    const std::string slice = result.costs.size() > stages ? concat(", slice ", i / stages) : "";
    costs.push_back({concat(i % stages, slice), milliseconds(cost.forward), milliseconds(cost.backward_p1),
                     milliseconds(cost.backward_p2)});
  }
  print_table(costs);
  std::cout << "message " << milliseconds(result.message_seconds) << '\n';
}

nlohmann::ordered_json to_json(const Compared& value) {
  return {{"predicted", value.predicted}, {"measured", value.measured}};
}

std::string json_text(const Trace& trace, const Comparison& result) {
  nlohmann::ordered_json json;
  json["schedule"] = trace.run->schedule.name;
  json["p2"] = policy_name(trace.run->schedule.policy);
  json["stages"] = trace.run->schedule.stages;
  json["micro_batches"] = trace.run->schedule.micro_batches;
  json["steps"] = result.steps;
  json["replayed"] = result.replayed;
  json["step_seconds"] = to_json(result.step_seconds);
  json["message_seconds"] = result.message_seconds;
  for (size_t rank = 0; rank < result.idle.size(); ++rank) {
    json["ranks"].push_back(
        {{"idle_fraction", to_json(result.idle[rank])}, {"peak_bytes", to_json(result.peak_bytes[rank])}});
  }
  for (const StageCost& cost : result.costs) {
    json["stage_seconds"].push_back(
        {{"forward", cost.forward}, {"backward_p1", cost.backward_p1}, {"backward_p2", cost.backward_p2}});
  }
  return json.dump(1, ' ', /*ensure_ascii=*/true, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace

void plan_measured(const PlanOptions& options) {
  Trace trace = read_trace(options.measured);
  Comparison result;
  try {
    result = compare(trace);
  } catch (const Error& error) {
    fail(options.measured, ": ", error.what());
  }
  print_tables(trace, result);
  if (!options.json.empty()) write_output("--json", options.json, json_text(trace, result));
  if (!options.svg.empty()) {
    SvgOptions picture;
    picture.title = concat("predicted: ", trace.title);
    picture.seconds = true;
    picture.until = options.svg_end;
    write_output("--svg", options.svg, draw_svg(trace.run->schedule, result.simulation, picture));
  }
  if (!options.timeline.empty()) {
    trace.predicted = std::move(result.step);
    if (result.replayed) trace.facts.emplace_back("predicted W", "as simulated, not as recorded");
    write_output("--timeline", options.timeline, timeline_html(trace));
  }
}

}  // namespace twobp
