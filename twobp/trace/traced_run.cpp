#include "twobp/trace/traced_run.h"

#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/passes.h"

namespace twobp {
namespace {

using nlohmann::ordered_json;

constexpr int kFormat = 1;
constexpr int kMostP2Units = 100000;  // a stage has one unit for each linear layer
constexpr size_t kMostName = 200;     // characters written
constexpr size_t kMostText = 1000;    // read: invalid UTF-8 becomes three times as long

struct StageField {
  const char* name;
  double StageCost::*value;
};
constexpr StageField kStageFields[] = {{"forward", &StageCost::forward},
                                       {"backward_p1", &StageCost::backward_p1},
                                       {"backward_p2", &StageCost::backward_p2},
                                       {"optimizer", &StageCost::optimizer},
                                       {"activation_bytes", &StageCost::activation_bytes},
                                       {"stash_bytes", &StageCost::stash_bytes},
                                       {"output_bytes", &StageCost::output_bytes},
                                       {"input_gradient_bytes", &StageCost::input_gradient_bytes},
                                       {"gradient_bytes", &StageCost::gradient_bytes},
                                       {"fixed_bytes", &StageCost::fixed_bytes}};

struct LayerField {
  const char* name;
  double LayerCost::*value;
  bool may_be_negative = false;
};
constexpr LayerField kLayerFields[] = {{"forward", &LayerCost::forward},
                                       {"backward_p1", &LayerCost::backward_p1},
                                       {"backward_p2", &LayerCost::backward_p2},
                                       {"forward_peak", &LayerCost::forward_peak},
                                       {"forward_held", &LayerCost::forward_held, true},
                                       {"p1_peak", &LayerCost::p1_peak},
                                       {"p1_held", &LayerCost::p1_held, true},
                                       {"stash", &LayerCost::stash},
                                       {"p2_peak", &LayerCost::p2_peak}};

// A schedule's name may be the path of its file. The end of a path says most.
std::string short_name(const std::string& name) {
  return name.size() <= kMostName ? name : "..." + name.substr(name.size() - (kMostName - 3));
}

ordered_json schedule_json(const Schedule& schedule) {
  ordered_json json = {{"name", short_name(schedule.name)},
                       {"p2", policy_name(schedule.policy)},
                       {"micro_batches", schedule.micro_batches},
                       {"rank_of_stage", schedule.rank_of_stage},
                       {"slices", schedule.slices},
                       {"allow_reorder", schedule.allow_reorder},
                       {"ranks", ordered_json::array()}};
  for (const auto& rank : schedule.ranks) {
    ordered_json list = ordered_json::array();
    for (const Instruction& each : rank) {
      if (!is_compute(each.op)) continue;
      list.push_back({op_name(each.op), each.stage, each.micro_batch});
      if (each.count != 1) list.back().push_back(each.count);
    }
    json["ranks"].push_back(std::move(list));
  }
  return json;
}

class RunReader {
 public:
  explicit RunReader(const std::string& origin) : origin_(origin) {}

  TracedRun read(const ordered_json& json) const {
    const int64_t format = integer(json, "format", 0, INT32_MAX);
    TWOBP_CHECK(format == kFormat, origin_, ": the run's description has format ", format,
                ", but this program reads format ", kFormat, ": record the trace again");
    TracedRun run;
    run.schedule = schedule(member(json, "schedule"));
    for (const ordered_json& each : array(json, "costs")) run.costs.push_back(cost(each));
    const size_t stages = run.schedule.stages;
    TWOBP_CHECK(run.costs.size() == stages || run.costs.size() == stages * run.schedule.slices, origin_,
                ": it has the costs of ", run.costs.size(), " stages, but the schedule has ", stages);
    for (const ordered_json& each : array(json, "cap_per_rank")) {
      run.cap_per_rank.push_back(number(each, "cap_per_rank", false));
    }
    TWOBP_CHECK(run.cap_per_rank.empty() || run.cap_per_rank.size() == run.schedule.ranks.size(), origin_,
                ": cap_per_rank has ", run.cap_per_rank.size(), " entries for ", run.schedule.ranks.size(), " ranks");
    return run;
  }

 private:
  const ordered_json& member(const ordered_json& object, const char* name) const {
    TWOBP_CHECK(object.is_object() && object.contains(name), origin_, ": the run's description has no ", name,
                ": record the trace again");
    return object.at(name);
  }
  const ordered_json& array(const ordered_json& object, const char* name) const {
    const ordered_json& found = member(object, name);
    TWOBP_CHECK(found.is_array(), origin_, ": ", name, " is not a list");
    return found;
  }
  double number(const ordered_json& value, const char* name, bool may_be_negative) const {
    TWOBP_CHECK(
        value.is_number() && std::isfinite(value.get<double>()) && (may_be_negative || value.get<double>() >= 0),
        origin_, ": ", name, " is ", value.dump().substr(0, 40), ", not a number",
        may_be_negative ? "" : " of at least 0");
    return value.get<double>();
  }
  int64_t whole(const ordered_json& value, const char* name, int64_t low, int64_t high) const {
    TWOBP_CHECK(value.is_number_integer() && value >= low && value <= high, origin_, ": ", name, " is ",
                value.dump().substr(0, 40), ", not a whole number from ", low, " to ", high);
    return value.get<int64_t>();
  }
  int64_t integer(const ordered_json& object, const char* name, int64_t low, int64_t high) const {
    return whole(member(object, name), name, low, high);
  }
  std::string text(const ordered_json& object, const char* name) const {
    const ordered_json& found = member(object, name);
    TWOBP_CHECK(found.is_string() && found.get_ref<const std::string&>().size() <= kMostText, origin_, ": ", name,
                " is not a short text");
    return found.get<std::string>();
  }

  Op op(const ordered_json& value) const {
    if (value.is_string()) {
      for (const Op each : {Op::kForward, Op::kBackwardP1, Op::kBackwardP2, Op::kBackward}) {
        if (value.get_ref<const std::string&>() == op_name(each)) return each;
      }
    }
    fail(origin_, ": '", value.dump().substr(0, 40), "' is not an op of a schedule: F, I, W or B");
  }

  Instruction instruction(const ordered_json& cell, const Schedule& schedule) const {
    TWOBP_CHECK(cell.is_array() && (cell.size() == 3 || cell.size() == 4), origin_, ": ", cell.dump().substr(0, 60),
                " is not an instruction: [op, stage, micro-batch]");
    const int all = schedule.micro_batches;
    Instruction read;
    read.op = op(cell[0]);
    read.stage = static_cast<int>(whole(cell[1], "a stage", 0, schedule.stages - 1));
    read.micro_batch = static_cast<int>(whole(cell[2], "a micro-batch", 0, all - 1));
    if (cell.size() == 4) {
      read.count = static_cast<int>(whole(cell[3], "a number of micro-batches", 1, all - read.micro_batch));
    }
    return read;
  }

  Schedule schedule(const ordered_json& json) const {
    Schedule read;
    read.name = text(json, "name");
    try {
      read.policy = parse_policy(text(json, "p2"));
    } catch (const Error& error) {
      fail(origin_, ": ", error.what());
    }
    const ordered_json& ranks = array(json, "ranks");
    const ordered_json& placement = array(json, "rank_of_stage");
    TWOBP_CHECK(!ranks.empty() && !placement.empty(), origin_, ": the schedule has no ranks or no stages");
    for (const ordered_json& each : placement) {
      read.rank_of_stage.push_back(
          static_cast<int>(whole(each, "rank_of_stage", 0, static_cast<int64_t>(ranks.size()) - 1)));
    }
    read.stages = static_cast<int>(read.rank_of_stage.size());
    std::vector<bool> used(ranks.size(), false);
    for (const int rank : read.rank_of_stage) used[rank] = true;
    const auto unused = std::find(used.begin(), used.end(), false);
    TWOBP_CHECK(unused == used.end(), origin_, ": rank ", unused - used.begin(), " of the schedule has no stage");
    read.allow_reorder = member(json, "allow_reorder") == true;
    // No more micro-batches than cells: memory is only allocated in proportion to the size of the file.
    size_t cells = 0;
    for (const ordered_json& rank : ranks) {
      TWOBP_CHECK(rank.is_array(), origin_, ": a rank of the schedule is not a list");
      cells += rank.size();
    }
    read.micro_batches =
        static_cast<int>(integer(json, "micro_batches", 1, std::max<int64_t>(1, std::min<int64_t>(INT32_MAX, cells))));
    if (json.contains("slices")) read.slices = static_cast<int>(integer(json, "slices", 1, read.micro_batches));
    TWOBP_CHECK(read.micro_batches % read.slices == 0, origin_, ": ", read.micro_batches, " micro-batches, which ",
                read.slices, " slices do not divide");
    for (const ordered_json& rank : ranks) {
      read.ranks.emplace_back();
      for (const ordered_json& cell : rank) read.ranks.back().push_back(instruction(cell, read));
    }
    try {
      read = add_communication(std::move(read));
      validate(read);
    } catch (const Error& error) {
      const std::string what = error.what();  // the grid after it does not help a reader of the trace
      fail(origin_, ": the run's schedule: ", what.substr(0, what.find('\n')));
    }
    return read;
  }

  StageCost cost(const ordered_json& json) const {
    StageCost read;
    for (const StageField& field : kStageFields) {
      read.*field.value = number(member(json, field.name), field.name, false);
    }
    read.p2_units = static_cast<int>(integer(json, "p2_units", 1, kMostP2Units));
    for (const ordered_json& each : array(json, "layers")) {
      LayerCost layer;
      for (const LayerField& field : kLayerFields) {
        layer.*field.value = number(member(each, field.name), field.name, field.may_be_negative);
      }
      layer.p2_units = static_cast<int>(integer(each, "p2_units", 0, kMostP2Units));
      read.layers.push_back(layer);
    }
    return read;
  }

  const std::string& origin_;
};

}  // namespace

TracedRun traced_run(const Pipeline& pipeline, const StepPlan& plan) {
  TracedRun run{plan.schedule, profiled_costs(pipeline.layer_costs()), {}};
  for (const int64_t cap : plan.caps) run.cap_per_rank.push_back(static_cast<double>(cap));
  return run;
}

ordered_json to_json(const TracedRun& run) {
  ordered_json json = {{"format", kFormat}, {"schedule", schedule_json(run.schedule)}};
  json["costs"] = ordered_json::array();
  for (const StageCost& cost : run.costs) {
    ordered_json entry = {{"p2_units", cost.p2_units}};
    for (const StageField& field : kStageFields) entry[field.name] = cost.*field.value;
    entry["layers"] = ordered_json::array();
    for (const LayerCost& layer : cost.layers) {
      ordered_json one = {{"p2_units", layer.p2_units}};
      for (const LayerField& field : kLayerFields) one[field.name] = layer.*field.value;
      entry["layers"].push_back(std::move(one));
    }
    json["costs"].push_back(std::move(entry));
  }
  json["cap_per_rank"] = run.cap_per_rank;
  return json;
}

TracedRun parse_traced_run(const ordered_json& json, const std::string& origin) {
  return RunReader(origin).read(json);
}

}  // namespace twobp
