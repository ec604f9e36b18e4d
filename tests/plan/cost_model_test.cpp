// Tests the cost model: the costs of a stage, sizes between the measured ones, the formulas of recomputation,
// and the file with all its possible errors.
#include "twobp/plan/cost_model.h"

#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "tests/plan/support.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;

TEST(CostModel, SumsLayersToStages) {
  CostModel model = model_of({{.forward = 1}, {.forward = 2, .backward_p2 = 0}, {.forward = 4, .output = 3}});
  model.kinds["kind2"].optimizer_seconds = 0.5;
  model.kinds["kind0"].update_bytes = 6;
  model.kinds["kind1"].update_bytes = 4;
  const auto stages = stage_costs(model, {2, 1}, 2);
  ASSERT_EQ(stages.size(), 2U);
  EXPECT_EQ(stages[0].forward, 2 * (1 + 2));
  EXPECT_EQ(stages[0].backward_p1, 2 * 2);
  EXPECT_EQ(stages[0].backward_p2, 2 * 1);
  EXPECT_EQ(stages[0].p2_units, 1);
  EXPECT_EQ(stages[0].optimizer, 0);
  EXPECT_EQ(stages[0].fixed_bytes, 60);
  EXPECT_EQ(stages[0].update_bytes, 6);
  EXPECT_EQ(stages[0].gradient_bytes, 20);
  EXPECT_EQ(stages[0].output_bytes, 2 * 2);
  EXPECT_EQ(stages[0].layers.size(), 2U);
  EXPECT_EQ(stages[1].input_gradient_bytes, 2 * 3);
  EXPECT_EQ(stages[1].optimizer, 0.5);
  EXPECT_EQ(stages[1].stash_bytes, 2 * 8);
  EXPECT_EQ(stages[1].activation_bytes, 2 * (10 + 3));
  expect_contains(error_of([&] { stage_costs(model, {2, 2}, 1); }), {"3 layers"});
  expect_contains(error_of([&] { stage_costs(model, {2, 1}, 0); }), {"at least 1 sample"});
}

// A tied weight is in each memory once, its gradient with the last of two uses. What replicas share out is divided by
// their number.
TEST(CostModel, CountsWeightsOncePerMemory) {
  CostModel model = model_of({{}, {}, {}});  // of 30 bytes, 10 of which are gradients
  model.kinds["kind0"].tied["table"] = model.kinds["kind2"].tied["table"] = {6, 5};
  model.kinds["kind1"].sharded_bytes = 8;
  const auto fixed = [&](const std::vector<int>& split, const WeightPlaces& places) {
    std::vector<double> bytes;
    for (const StageCost& stage : stage_costs(model, split, 1, 1, places)) bytes.push_back(stage.fixed_bytes);
    return bytes;
  };
  EXPECT_EQ(fixed({3}, {}), (std::vector<double>{79}));
  EXPECT_EQ(fixed({1, 1, 1}, {}), (std::vector<double>{30, 30, 30}));
  EXPECT_EQ(fixed({1, 1, 1}, {.rank_of_stage = {0, 1, 0}}), (std::vector<double>{25, 30, 24}));
  EXPECT_EQ(fixed({1, 1, 1}, {.one_memory = true}), (std::vector<double>{25, 30, 24}));
  EXPECT_EQ(fixed({1, 1, 1}, {.replicas = 4}), (std::vector<double>{30, 24, 30}));
}

// A layer without a backward pass saves nothing and is never updated.
TEST(CostModel, FrozenLayersHaveNoBackward) {
  CostModel model = model_of({{.output = 2}, {.output = 5}, {}});
  for (auto& [name, kind] : model.kinds) kind.optimizer_seconds = 1;
  model.first_trainable = 2;
  const auto stages = stage_costs(model, {2, 1}, 1);
  EXPECT_EQ(stages[0].backward_p1 + stages[0].backward_p2, 0);
  EXPECT_EQ(stages[0].activation_bytes, 2 + (5 - 2));  // the outputs; each takes its input's place
  EXPECT_EQ(stages[0].optimizer, 0);
  EXPECT_EQ(stages[0].fixed_bytes, 20);  // the weights only
  EXPECT_EQ(stages[1].optimizer, 1);
}

TEST(CostModel, InterpolatesBetweenMeasuredSizes) {
  CostModel model = model_of({{.forward = 1}});
  model.micro_batch_sizes = {2, 6};
  auto& at = model.kinds["kind0"].at_size;
  at[0].forward = 10;
  at[1].forward = 14;
  at[0].stash = 100;
  at[1].stash = 300;
  const auto forward = [&](int size) { return layer_costs_at(model, size)[0].forward; };
  EXPECT_EQ(forward(2), 10);
  EXPECT_EQ(forward(6), 14);
  EXPECT_EQ(forward(4), 12);
  EXPECT_EQ(forward(1), 5);    // in proportion to 2
  EXPECT_EQ(forward(12), 28);  // in proportion to 6
  EXPECT_EQ(layer_costs_at(model, 3)[0].stash, 150);
  at[0].forward = 0.2;
  at[1].forward = 0.9;
  EXPECT_EQ(forward(6), 0.9) << "a measured size, to the last bit";
}

TEST(CostModel, InterpolatesEveryNumber) {
  CostModel model = model_of({{}});
  auto& at = model.kinds["kind0"].at_size;
  const std::vector<double LayerCost::*> fields = {
      &LayerCost::forward,      &LayerCost::backward_p1,  &LayerCost::backward_p2,      &LayerCost::forward_peak,
      &LayerCost::forward_held, &LayerCost::p1_peak,      &LayerCost::p1_held,          &LayerCost::stash,
      &LayerCost::p2_peak,      &LayerCost::forward_rise, &LayerCost::backward_p1_rise, &LayerCost::backward_p2_rise};
  model.micro_batch_sizes = {2, 10};
  for (size_t i = 0; i < fields.size(); ++i) {
    at[0].*fields[i] = static_cast<double>(i + 1);
    at[1].*fields[i] = static_cast<double>(20 * i + 9);
  }
  at[0].output = at[0].input_gradient = 4;
  at[1].output = 8;
  at[1].input_gradient = 12;
  const LayerCost between = layer_costs_at(model, 4)[0];  // a quarter of the way
  const LayerCost below = layer_costs_at(model, 1)[0];
  for (size_t i = 0; i < fields.size(); ++i) {
    const double low = at[0].*fields[i], high = at[1].*fields[i];
    EXPECT_EQ(between.*fields[i], low + (high - low) / 4) << i;
    EXPECT_EQ(below.*fields[i], low / 2) << i;
  }
  EXPECT_EQ(between.output, 5);
  EXPECT_EQ(between.input_gradient, 6);
  EXPECT_EQ(below.output, 2);
  EXPECT_EQ(between.p2_units, 1);
}

// models/recompute/recompute_layer.h says which work runs again and which tensors are kept.
TEST(CostModel, FollowsTheFormulaOfRecomputation) {
  const TestKind kind{.forward = 1, .backward_p1 = 2, .backward_p2 = 4, .held = 10, .stash = 8, .output = 3};
  CostModel model = model_of({kind, kind, kind});
  model.kinds["kind1"].at_size[0].forward_rise = 0.5;
  model.kinds["kind1"].at_size[0].backward_p1_rise = 0.75;
  const auto middle = [&](const char* mode) { return layer_costs_at(with_recompute(model, mode), 1)[1]; };
  const LayerCost none = middle("none");
  const LayerCost activations = middle("activations");
  EXPECT_EQ(activations.forward, 1);
  EXPECT_EQ(activations.backward_p1, 1 + 2);
  EXPECT_EQ(activations.backward_p2, 4);
  EXPECT_EQ(activations.forward_held, 3);  // the output
  EXPECT_EQ(activations.stash, 8);
  const LayerCost derivatives = middle("derivatives");
  EXPECT_EQ(derivatives.backward_p1, 2);
  EXPECT_EQ(derivatives.backward_p2, 1 + 2 + 4);
  EXPECT_EQ(derivatives.forward_held, 13);
  EXPECT_EQ(derivatives.stash, 3 + 3);  // input and dL/dy
  const LayerCost both = middle("both");
  EXPECT_EQ(both.backward_p1, 1 + 2);
  EXPECT_EQ(both.backward_p2, 1 + 2 + 4);
  EXPECT_EQ(both.forward_held, 3);
  EXPECT_EQ(both.stash, 6);
  EXPECT_EQ(activations.backward_p1_rise, 0.5 + 0.75) << "what runs again rises again";
  EXPECT_EQ(activations.backward_p2_rise, 0);
  EXPECT_EQ(derivatives.backward_p1_rise, 0.75);
  EXPECT_EQ(derivatives.backward_p2_rise, 0.5 + 0.75);
  // Whatever tensors a mode keeps, nothing remains after W.
  for (const LayerCost& cost : {none, activations, derivatives, both}) {
    EXPECT_EQ(cost.forward_held + cost.p1_held - cost.stash, none.forward_held + none.p1_held - none.stash);
  }
  const auto all = layer_costs_at(with_recompute(model, "both"), 1);
  EXPECT_EQ(all[0].backward_p2, 4) << "the first layer is left alone";
  EXPECT_EQ(all[2].backward_p2, 4) << "the last layer is left alone, too";
  expect_contains(error_of([&] { with_recompute(model, "activation"); }), {"'activations'"});
}

// The measured costs already include a recomputation, so a second one would count it twice.
TEST(CostModel, RecomputesOnlyOnce) {
  const CostModel model = model_of({{}, {}, {}});
  EXPECT_FALSE(computes_again(model));
  for (const char* mode : {"activations", "derivatives", "both"}) {
    const CostModel once = with_recompute(model, mode);
    EXPECT_TRUE(computes_again(once));
    EXPECT_EQ(with_recompute(once, "none").layers[1].kind, once.layers[1].kind);
    expect_contains(error_of([&] { with_recompute(once, "both"); }), {"layer.1", "already"});
  }
}

TEST(CostModel, PrefersMeasuredRecomputation) {
  CostModel model = model_of({{}, {}, {}});
  KindCosts measured = model.kinds["kind1"];
  measured.at_size[0].backward_p1 = 77;
  model.kinds["kind1+activations"] = measured;
  EXPECT_EQ(layer_costs_at(with_recompute(model, "activations"), 1)[1].backward_p1, 77);
}

TEST(CostModelFile, ComesBackAsWritten) {
  CostModel model = model_of({{.forward = 0.125}, {.backward_p2 = 0, .fixed = 0}, {.held = 1.5}});
  model.first_trainable = 1;
  model.link_latency = 2e-6;
  model.link_bytes_per_second = 1e9;
  model.made_on = "a machine";
  model.sample_costs = {0.5, 1.5};
  model.kinds["kind1"].at_size[1].backward_p1_rise = -0.25;  // noise: its seconds do not depend on the samples
  model.kinds["kind0"].tied = {{"table", {5, 2}}};
  model.kinds["kind0"].sharded_bytes = 4;
  const std::string text = cost_model_to_json(model);
  const CostModel read = parse_cost_model(text, "costs.json");
  EXPECT_EQ(cost_model_to_json(read), text);
  EXPECT_EQ(read.link_latency, 2e-6);
  EXPECT_EQ(read.first_trainable, 1);
  EXPECT_EQ(read.layers[2].name, "layer.2");
  EXPECT_EQ(read.kinds.at("kind2").at_size[1].stash, 16);
  EXPECT_EQ(read.sample_costs, model.sample_costs);
  EXPECT_EQ(read.kinds.at("kind1").at_size[1].backward_p1_rise, -0.25);
  EXPECT_EQ(layer_costs_at(read, 2)[0].forward, 0.25);
  EXPECT_EQ(read.kinds.at("kind0").tied.at("table").gradient, 2);
  EXPECT_EQ(read.kinds.at("kind0").sharded_bytes, 4);
}

json good() {
  return json::parse(cost_model_to_json(model_of({{}, {}})));
}

std::string error_with(const std::function<void(json&)>& change) {
  json file = good();
  change(file);
  return error_of([&] { parse_cost_model(file.dump(), "costs.json"); });
}

TEST(CostModelFile, ReportsBadFiles) {
  EXPECT_EQ(error_with([](json&) {}), "");
  const auto costs = [](json& file) -> json& { return file["kinds"]["kind1"]["costs"][1]; };
  const auto set = [&](const char* key, const json& value) {
    return error_with([&](json& file) { costs(file)[key] = value; });
  };
  const std::vector<std::string> place = {"costs.json", "kind1"};
  const auto expect_at = [&](const std::string& error, std::vector<std::string> parts) {
    parts.insert(parts.end(), place.begin(), place.end());
    expect_contains(error, parts);
    EXPECT_EQ(error.find('\n'), std::string::npos) << "one line";
  };
  expect_at(set("forward_seconds", -1), {"forward_seconds", "negative"});
  expect_at(set("forward_seconds", 0), {"forward seconds are 0"});
  expect_at(set("backward_p2_seconds", "1"), {"backward_p2_seconds", "number"});
  expect_at(set("backward_p1_seconds", nullptr), {"backward_p1_seconds", "null"});
  expect_at(set("held_bytes_after_p1", -4), {"held_bytes_after_p1", "negative"});
  expect_at(set("p2_units", 1.5), {"p2_units", "whole number"});
  expect_at(set("p2_units", 0), {"no p2 units"});
  expect_at(error_with([&](json& file) { costs(file).erase("output_bytes"); }), {"there is no \"output_bytes\""});
  expect_contains(error_with([](json& file) { file["kinds"]["kind1"]["costs"].erase(1); }),
                  {"kinds.kind1.costs", "an entry for each of the 2 micro_batch_sizes"});
  expect_contains(error_with([](json& file) {
                    file["kinds"]["kind1"]["tied"]["table"] = {{"weight_bytes", 21}, {"gradient_bytes", 10}};
                  }),
                  {"kind1", "tied bytes are 31", "30"});
  expect_contains(error_with([](json& file) { file["kinds"].erase("kind1"); }), {"layer.1", "kind1"});
  EXPECT_EQ(error_with([](json& file) { file["kinds"]["kind0"].erase("update_bytes"); }), "") << "older files";
  expect_contains(error_with([](json& file) { file["first_trainable"] = 2147483648; }),
                  {"first_trainable: is 2147483648, outside 0 to 2147483647"});
  expect_contains(error_with([](json& file) { file["first_trainable"] = -1; }), {"is -1, outside 0"});
  expect_contains(error_with([](json& file) { file["kinds"]["kind0"].erase("optimizer_seconds"); }),
                  {"kind0", "optimizer_seconds"});
  expect_contains(error_with([](json& file) { file["layers"] = json::array(); }), {"needs layers"});
  expect_contains(error_with([](json& file) { file["layers"] = 3; }), {"layers: is not a list, but 3"});
  expect_contains(error_with([](json& file) { file["sample_costs"] = 3; }), {"sample_costs: is not a list, but 3"});
  expect_contains(error_with([](json& file) { file["sample_costs"] = {"dear"}; }),
                  {"sample_costs[0]: is not a finite number, but \"dear\""});
  EXPECT_EQ(error_with([](json& file) {
              file["sample_costs"] = {0.1 + 0.2, 0.3, 2.4};
            }),
            "")
      << "equal but for the last digit";
  const auto rise = [&](double seconds) {
    return error_with([&](json& file) {
      file["sample_costs"] = {0.5, 1.5};
      costs(file)["forward_rise_seconds"] = seconds;  // of 2 seconds
    });
  };
  EXPECT_EQ(rise(4), "");
  EXPECT_EQ(rise(-4), "");
  expect_at(rise(4.5), {"forward would take -0.25 seconds", "cost 0.5 times"});
  expect_at(rise(-4.5), {"forward would take -0.25 seconds", "cost 1.5 times"});
  expect_at(set("forward_rise", 1), {"unknown field \"forward_rise\""});
  expect_contains(error_with([](json& file) { file["sample_cost"] = {0, 2}; }), {"unknown field \"sample_cost\""});
  expect_contains(error_with([](json& file) { file["kinds"]["kind1"]["slices"] = 3; }),
                  {"kind1", "unknown field \"slices\""});
  expect_contains(error_with([](json& file) { file["sample_costs"] = {2, 0}; }), {"fall from 2 to 0"});
  expect_contains(error_with([](json& file) { file["sample_costs"] = {-1, 3}; }), {"cost of samples 0 is -1"});
  expect_contains(error_with([](json& file) { file["sample_costs"] = {1, 2}; }), {"mean of 1.5", "must be 1"});
  expect_contains(error_with([](json& file) { file["micro_batch_sizes"] = {2, 1}; }), {"order"});
  expect_contains(error_with([](json& file) { file["first_trainable"] = 9; }), {"first_trainable", "9"});
  expect_contains(error_with([](json& file) { file["link"]["latency_seconds"] = -1; }), {"latency_seconds"});
  expect_contains(error_with([](json& file) { file.erase("link"); }), {"\"link\""});
  expect_contains(error_with([](json& file) { file["format"] = "other"; }), {"no cost model", "twobp profile"});
  expect_contains(error_of([] { parse_cost_model("[1]", "costs.json"); }), {"costs.json", "object"});
  expect_contains(error_of([] { parse_cost_model("{\"a\": ", "costs.json"); }), {"costs.json", "not JSON"});
  expect_contains(error_of([] { read_cost_model("no/such/file"); }), {"no/such/file"});
  // A double cannot hold 1e999.
  std::string text = good().dump();
  const std::string number = "\"forward_seconds\":1,";
  ASSERT_NE(text.find(number), std::string::npos) << text;
  text.replace(text.find(number), number.size(), "\"forward_seconds\":1e999,");
  expect_contains(error_of([&] { parse_cost_model(text, "costs.json"); }), {"costs.json"});
}

// Whatever a file contains, the message is one short line.
TEST(CostModelFile, BoundsDepthSizeAndMessages) {
  const auto error = [](const std::string& text) {
    const std::string what = error_of([&] { parse_cost_model(text, "costs.json"); });
    EXPECT_LT(what.size(), 500U) << what.substr(0, 500);
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    return what;
  };
  const std::string deep(100'000, '[');
  expect_contains(error(deep), {"costs.json", "nested"});
  const std::string text = good().dump();
  const auto with = [&](const std::string& part, const std::string& other) {
    std::string changed = text;
    EXPECT_NE(text.find(part), std::string::npos) << part;
    changed.replace(text.find(part), part.size(), other);
    return changed;
  };
  const std::string number = "\"first_trainable\":0";
  const std::string nested = deep + std::string(deep.size(), ']');
  expect_contains(error(with(number, "\"first_trainable\":" + nested)), {"costs.json", "nested"});
  expect_contains(error(with(number, "\"first_trainable\":[[[1]]]")), {"first_trainable", "a list"});
  expect_contains(error(with(number, number + ',' + number)), {"costs.json", "\"first_trainable\" is there twice"});
  const std::string line = '"' + std::string(1'000'000, 'x') + '"';
  expect_contains(error(with(number, "\"first_trainable\":" + line)), {"first_trainable", "xxx"});
  expect_contains(error(with("\"latency_seconds\":0.0", "\"latency_seconds\":" + line)), {"latency_seconds", "xxx"});
  expect_contains(error(with("\"layer.0\"", line)), {"layers[0].name", "1000000 bytes"});
  // 40 characters of a value are shown, its quotes included.
  const std::string shown = '"' + std::string(38, 'y') + '"';
  expect_contains(error(with(number, "\"first_trainable\":" + shown)), {"but " + shown});
  expect_contains(error(with(number, "\"first_trainable\":\"yy" + shown.substr(1))),
                  {"but \"" + std::string(39, 'y') + "..."});
  expect_contains(error(with("\"kind1\":", line + ":")), {"kinds", "1000000 bytes"});
  expect_contains(error(line.substr(1)), {"costs.json", "not JSON"});
  expect_contains(error(std::string(size_t{17} << 20U, ' ')), {"costs.json", "16 MiB"});
}

TEST(CostModel, RejectsInconsistentValues) {
  CostModel model = model_of({{}});
  model.kinds["kind0"].at_size[0].forward = std::numeric_limits<double>::infinity();
  expect_contains(error_of([&] { check_cost_model(model); }), {"kind0", "forward", "from 0 to 1e+18"});
  model.kinds["kind0"].at_size[0].forward = 1e300;  // sums would overflow
  expect_contains(error_of([&] { check_cost_model(model); }), {"kind0", "forward", "1e+300"});
  model = model_of({{}});
  model.kinds["kind0"].optimizer_bytes = NAN;
  expect_contains(error_of([&] { check_cost_model(model); }), {"kind0", "optimizer bytes"});
  model = model_of({{.backward_p2 = 0}});
  model.kinds["kind0"].at_size[1].stash = 1;
  expect_contains(error_of([&] { check_cost_model(model); }), {"kind0", "size 2", "stash"});
  const auto error_after = [](const std::function<void(CostModel&, KindCosts&)>& change) {
    CostModel changed = model_of({{}});
    change(changed, changed.kinds["kind0"]);
    return error_of([&] { check_cost_model(changed); });
  };
  // The limits themselves are taken.
  EXPECT_EQ(error_after([](CostModel& of, KindCosts& kind) {
              of.first_trainable = 1;
              of.link_latency = kMostCost;
              kind.parameters = kind.update_bytes = kMostCost;
              kind.at_size[0].forward = kMostCost;
              kind.at_size[0].forward_held = -kMostCost;
              kind.at_size[1].p1_held = kMostCost;
              kind.at_size[0].p2_units = 0;
              kind.at_size[0].backward_p2 = kind.at_size[0].stash = 0;
            }),
            "");
  using Change = std::function<void(CostModel&, KindCosts&)>;
  const std::vector<std::pair<Change, std::string>> faults = {
      {[](CostModel& of, KindCosts&) { of.first_trainable = 2; }, "first_trainable is 2, but must be from 0 to 1"},
      {[](CostModel& of, KindCosts&) { of.first_trainable = -1; }, "first_trainable is -1"},
      {[](CostModel& of, KindCosts&) {
         of.micro_batch_sizes = {0, 1};
       },
       "micro-batch size 0"},
      {[](CostModel& of, KindCosts&) {
         of.micro_batch_sizes = {2, 2};
       },
       "micro-batch size 2"},
      {[](CostModel& of, KindCosts&) { of.link_latency = -1; }, "link latency"},
      {[](CostModel& of, KindCosts&) { of.link_bytes_per_second = -1; }, "link bytes per second"},
      {[](CostModel&, KindCosts& kind) { kind.parameters = -1; }, "number of parameters"},
      {[](CostModel&, KindCosts& kind) { kind.parameter_bytes = -1; }, "parameter bytes"},
      {[](CostModel&, KindCosts& kind) { kind.gradient_bytes = -1; }, "gradient bytes"},
      {[](CostModel&, KindCosts& kind) { kind.optimizer_seconds = -1; }, "optimizer seconds"},
      {[](CostModel&, KindCosts& kind) { kind.update_bytes = -1; }, "bytes of the update"},
      {[](CostModel&, KindCosts& kind) { kind.at_size.pop_back(); },
       "costs at 1 micro-batch sizes, but the model has 2"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].backward_p1 = -1; }, "backward-p1 seconds"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].backward_p2 = -1; }, "backward-p2 seconds"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].p2_units = -1; }, "must not be negative"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].forward_peak = -1; }, "bytes during forward"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].p1_peak = -1; }, "bytes during backward-p1"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].p2_peak = -1; }, "bytes during backward-p2"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].stash = -1; }, "stash bytes"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].output = -1; }, "output bytes"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].input_gradient = -1; }, "input gradient bytes"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].forward_held = 1.1e18; }, "beyond"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].forward_rise = -1.1e18; }, "rise is"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].backward_p2_rise = NAN; }, "rise is"},
      {[](CostModel&, KindCosts& kind) { kind.at_size[0].p1_held = -1.1e18; }, "beyond"}};
  for (const auto& [change, part] : faults) expect_contains(error_after(change), {part});
  model = model_of({{}});
  model.micro_batch_sizes.clear();
  expect_contains(error_of([&] { check_cost_model(model); }), {"micro-batch size"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
