// Tests shapes that stand for many: the numbers that are computed from the sizes of fields, what must hold of
// them, tables, and programs that are bound to a micro-batch.
#include "twobp/graph/sizes.h"

#include <list>

#include <ATen/core/LegacyTypeDispatch.h>
#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "tests/graph/mlp_graph.h"
#include "twobp/graph/program_layer.h"

namespace twobp::TWOBP_FILE {
namespace {

using graph::ProgramLayer;
using test::MlpGraph;

const graph::FieldTypes kFields{{"x", {at::kLong, {3, 7}}}, {"one", {at::kFloat, {}}}};

std::vector<graph::Sizes::Number> numbers_of(const std::string& list) {
  const auto parsed = nlohmann::json::parse(list);
  return graph::Sizes(JsonNode(parsed, "graph.json", "sizes"), kFields).of(kFields);
}

// Entries 0 to 5: the sizes of x, which are 3 and 7, then -7, 0, 2.5 and 2^62.
std::string with(const std::string& entry) {
  return R"([{"field": "x", "dim": 0}, {"field": "x", "dim": 1}, {"number": -7}, {"number": 0}, {"number": 2.5},
             {"number": 4611686018427387904})" +
         std::string(entry.empty() ? "" : ", ") + entry + "]";
}

std::string op(const std::string& name, const std::string& of) {
  return "{\"do\": \"" + name + "\", \"of\": [" + of + "]}";
}

TEST(Sizes, AreThoseOfPython) {
  const auto whole = [](const std::string& name, const std::string& of) {
    const auto number = numbers_of(with(op(name, of))).back();
    EXPECT_FALSE(number.real) << name;
    return number.whole;
  };
  const auto real = [](const std::string& name, const std::string& of) {
    const auto number = numbers_of(with(op(name, of))).back();
    EXPECT_TRUE(number.real) << name;
    return number.value;
  };
  EXPECT_EQ(numbers_of(with(""))[1].whole, 7);
  EXPECT_EQ(whole("add", "0, 1"), 10);
  EXPECT_EQ(whole("mul", "0, 2"), -21);
  EXPECT_EQ(whole("floordiv", "1, 0"), 2);
  EXPECT_EQ(whole("floordiv", "2, 0"), -3);
  EXPECT_EQ(whole("mod", "2, 0"), 2);
  EXPECT_EQ(whole("mod", "1, 2"), 0);
  EXPECT_EQ(whole("mod", "0, 2"), -4);
  EXPECT_EQ(whole("max", "0, 2"), 3);
  EXPECT_EQ(whole("min", "0, 2"), -7);
  EXPECT_EQ(whole("pow", "1, 0"), 343);
  EXPECT_EQ(real("add", "0, 4"), 5.5);
  EXPECT_EQ(real("truediv", "1, 0"), 7.0 / 3);
  EXPECT_EQ(real("float", "1"), 7);
  EXPECT_EQ(real("sqrt", "1"), std::sqrt(7.0));
  EXPECT_EQ(real("pow", "1, 4"), std::pow(7.0, 2.5));
  EXPECT_EQ(whole("eq", "0, 1"), 0);
  EXPECT_EQ(whole("ne", "0, 1"), 1);
  EXPECT_EQ(whole("lt", "0, 4"), 0);
  EXPECT_EQ(whole("le", "0, 0"), 1);
  EXPECT_EQ(whole("gt", "4, 2"), 1);
  EXPECT_EQ(whole("ge", "2, 0"), 0);
  EXPECT_EQ(whole("and", "0, 3"), 0);
  EXPECT_EQ(whole("or", "0, 3"), 1);
  EXPECT_EQ(whole("not", "3"), 1);
}

TEST(Sizes, RefuseWhatIsWrong) {
  const auto refused = [](const std::string& entry, const std::vector<std::string>& message) {
    SCOPED_TRACE(entry);
    test::expect_error([&] { numbers_of(with(entry)); }, message);
  };
  // The list.
  refused(op("add", "0, 6"), {"graph.json", "sizes[6].of[1]", "is 6, outside 0 to 5"});  // itself
  refused(op("add", "0, 7") + ", " + op("add", "0, 6"), {"sizes[6].of[1]"});             // a cycle
  refused(op("add", "0, -1"), {"sizes[6].of[1]", "is -1"});
  refused(op("add", "0"), {"sizes[6].of", "has 1 entries, but \"add\" takes 2"});
  refused(op("not", "0, 1"), {"has 2 entries, but \"not\" takes 1"});
  refused(op("add", "0, 1, 2"), {"has 3 elements"});
  refused(op("sin", "0"), {"sizes[6].do", "\"sin\" is not a known operation"});
  refused(op("mod", "0, 4"), {"\"mod\" takes whole numbers"});
  refused(R"({"field": "y", "dim": 0})", {"sizes[6].field", "no field \"y\""});
  refused(R"({"field": "x", "dim": 2})", {"sizes[6].dim", "is 2, outside 0 to 1"});
  refused(R"({"field": "one", "dim": 0})", {"has no dimension"});
  refused(R"({"number": "1"})", {"sizes[6].number", "not a whole number"});
  refused(R"({"numbers": 1})", {"sizes[6]", "no \"do\""});
  std::string many = "[";
  for (size_t i = 0; i <= graph::kMostSizes; ++i) many += std::string(i == 0 ? "" : ",") + R"({"number": 1})";
  test::expect_error([&] { numbers_of(many + "]"); }, {"has 10001 elements"});
  // The numbers.
  refused(op("mul", "5, 0"), {"sizes[6]", "is too large"});
  refused(op("add", "5, 5"), {"is too large"});
  refused(op("pow", "1, 1") + ", " + op("pow", "6, 1"), {"sizes[7]", "is too large"});
  refused(op("pow", "1, 2"), {"exponent -7"});
  refused(op("floordiv", "0, 3"), {"divides by zero"});
  refused(op("mod", "0, 3"), {"divides by zero"});
  refused(op("truediv", "0, 3"), {"divides by zero"});
  refused(op("float", "5"), {"too large for a real number"});
  refused(op("sqrt", "2"), {"is not finite"});
}

// Programs for any number of samples up to 8, whose constant "scale" is multiplied with the number of
// samples.
std::string of_many() {
  std::string text = MlpGraph{.dtype = "float64"}.shape(test::kSamples);
  const auto replace = [&](const std::string& find, const std::string& by) {
    const size_t at = text.find(find);
    ASSERT_NE(at, std::string::npos) << find;
    text.replace(at, find.size(), by);
  };
  replace("\"shape\": [4, 3]", "\"shape\": [{\"size\": 0}, 3]");
  replace("\"shape\": [4, 2]", "\"shape\": [{\"size\": 0}, 2]");
  replace("\"programs\":",
          R"("sizes": [{"field": "input", "dim": 0}, {"number": 8}, {"do": "le", "of": [0, 1]}],
    "guards": [{"size": 2, "says": "input.size(0) <= 8"}],
    "tables": [{"slots": 2, "inputs": [{"constant": "scale", "slot": 0}],
                "code": [{"op": "aten::mul.Tensor", "args": [{"v": 0}, {"number": {"size": 0}}], "out": [1]}], "slot": 1}],
    "constants": [[], [{"table": 0}], [{"table": 0}], []], "programs":)");
  const size_t targets = text.find("\"targets\"");
  return text.substr(0, targets) + "\"targets\": {\"count\": {\"size\": 0}}}";
}

Fields fields_of(int64_t samples) {
  const auto random = [](at::IntArrayRef sizes, uint64_t seed) {
    return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kDouble));
  };
  return {{"input", random({samples, test::kIn}, 1)}, {"target", random({samples, test::kOut}, 2)}};
}

class ShapeOfMany : public ::testing::Test {
 protected:
  void SetUp() override { graph::add_shape(*graph_, of_many(), "shape", {}); }

  const at::AutoDispatchBelowADInplaceOrView below_autograd_;
  const MlpGraph mlp_{.dtype = "float64"};
  std::shared_ptr<graph::Graph> graph_ = mlp_.graph();
};

struct Outcome {
  at::Tensor y, dx;
  std::vector<at::Tensor> gradients;
};

// A layer in the middle.
struct OneLayer {
  explicit OneLayer(const std::shared_ptr<graph::Graph>& graph) : layer(graph, 1) {
    layer.collect_parameters(parameters);
    for (Parameter* parameter : parameters) {
      parameter->allocate_value(1);
      parameter->value.fill_(0.1);
      parameter->allocate_grad();
    }
  }
  void forward(int64_t samples, Saved& saved) {
    context.fields = &batches.emplace_back(fields_of(samples));
    y = layer.forward({at::linspace(-1, 2, samples * 5, at::kDouble).view({samples, 5})}, context, saved)[0];
  }
  // F and I. The units of W refer to `saved`.
  void begin(int64_t samples, Saved& saved) {
    forward(samples, saved);
    dx = layer.backward_p1({at::ones_like(y)}, context, saved)[0];
    layer.collect_p2(saved, units);
  }
  Outcome end() {
    for (const P2Unit& unit : units) unit.layer->backward_p2({&unit.saved, 1});
    Outcome result{y, dx, {}};
    for (Parameter* parameter : parameters) {
      if (parameter->trainable()) result.gradients.push_back(parameter->grad.clone());
    }
    return result;
  }

  ProgramLayer layer;
  Context context;
  std::list<Fields> batches;
  std::vector<Parameter*> parameters;
  std::vector<P2Unit> units;
  at::Tensor y, dx;
};

TEST_F(ShapeOfMany, ComputesWhatProgramsOfThatShapeCompute) {
  for (const int64_t samples : {1, 3, 7, 8}) {
    SCOPED_TRACE(samples);
    graph::Tensors scaled = mlp_.constants();
    scaled.at("scale").mul_(samples);
    const auto fixed = graph::parse_graph(mlp_.json(), "graph.json", scaled);
    graph::add_shape(*fixed, mlp_.shape(samples), "shape", {});
    Saved saved, wanted_saved;
    OneLayer run(graph_), wanted_run(fixed);
    run.begin(samples, saved);
    wanted_run.begin(samples, wanted_saved);
    const Outcome outcome = run.end(), wanted = wanted_run.end();
    EXPECT_TRUE(at::equal(outcome.y, wanted.y));
    EXPECT_TRUE(at::equal(outcome.dx, wanted.dx));
    ASSERT_EQ(outcome.gradients.size(), 2u);
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(outcome.gradients[i], wanted.gradients[i])) << i;
    EXPECT_EQ(graph_->count_targets(fields_of(samples)), samples);
  }
}

TEST_F(ShapeOfMany, AFixedShapeComesFirst) {
  EXPECT_TRUE(graph_->shape_of(fields_of(test::kSamples))->table_values.empty());
  EXPECT_EQ(graph_->shape_of(fields_of(5))->table_values.size(), 1u);
  EXPECT_EQ(graph_->shape_of(fields_of(5))->fields.at("input").sizes, (std::vector<int64_t>{5, 3}));
  EXPECT_EQ(graph_->shape_of(fields_of(5)), graph_->shape_of(fields_of(5)));  // bound once
}

TEST_F(ShapeOfMany, RefusesWhatItsGuardsExclude) {
  test::expect_error([&] { graph_->shape_of(fields_of(9)); },
                     {"no program for a micro-batch of input Double [9, 3]", "[any, 3]", "if input.size(0) <= 8"});
  Fields fields = fields_of(3);
  fields["target"] = at::zeros({4, 2}, at::kDouble);
  test::expect_error([&] { graph_->shape_of(fields); }, {"no program"});
  fields["target"] = at::zeros({3, 2});
  test::expect_error([&] { graph_->shape_of(fields); }, {"target Float [3, 2]"});
}

// A division by zero in the numbers means other programs, and no error of its own.
TEST_F(ShapeOfMany, TakesTheNextIfNumbersCannotBeComputed) {
  std::string text = of_many();
  const std::string find = "{\"do\": \"le\", \"of\": [0, 1]}";
  text.replace(text.find(find), find.size(), R"({"do": "floordiv", "of": [0, 3]})");
  const size_t number = text.find("{\"number\": 8}, ");
  text.replace(number, 15, R"({"number": 8}, {"number": 0}, )");
  test::expect_error([&] { graph::add_shape(*graph_, text, "shape", {}); }, {"shape: sizes[3].of[1]"});
  text.replace(text.find("\"of\": [0, 3]"), 12, "\"of\": [0, 2]");
  text.replace(text.find("{\"size\": 2, \"says\""), 18, "{\"size\": 3, \"says\"");
  const auto graph = mlp_.graph();
  graph::add_shape(*graph, text, "shape", {});
  test::expect_error([&] { graph->shape_of(fields_of(3)); }, {"no program"});
  graph::add_shape(*graph, of_many(), "shape", {});
  EXPECT_EQ(graph->shape_of(fields_of(3))->table_values.size(), 1u);
}

// Units of W stay valid while many other shapes come and go.
TEST_F(ShapeOfMany, KeepsWhatAMicroBatchUses) {
  std::string text = of_many();
  text.replace(text.find("{\"number\": 8}"), 13, "{\"number\": 900}");
  graph::add_shape(*graph_, text, "shape", {});
  Saved saved;
  OneLayer run(graph_);
  run.begin(5, saved);
  const at::Tensor y = run.y;
  for (int64_t samples = 10; samples < 300; ++samples) {
    Saved other;
    run.forward(samples, other);
  }
  run.y = y;
  const Outcome outcome = run.end();
  Saved again;
  OneLayer alone(graph_);
  alone.begin(5, again);
  const Outcome wanted = alone.end();
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(outcome.gradients[i], wanted.gradients[i])) << i;
}

TEST_F(ShapeOfMany, VariantsHaveTheirOwn) {
  const auto graph = mlp_.graph();
  graph::add_shape(*graph, of_many(), "shape", {}, /*variant=*/1);
  test::expect_error([&] { graph->shape_of(fields_of(3)); }, {"no program"});
  graph->use(1);
  EXPECT_EQ(graph->shape_of(fields_of(3))->variant, 1);
  graph->use(0);
  graph->drop(1);
  graph->use(1);
  test::expect_error([&] { graph->shape_of(fields_of(3)); }, {"no program"});
}

struct Bad {
  const char* name;
  std::string find;
  std::string replace;
  std::vector<std::string> message;
};

class BadShapeOfMany : public ::testing::TestWithParam<Bad> {};

TEST_P(BadShapeOfMany, IsRefused) {
  const Bad& bad = GetParam();
  std::string text = of_many();
  ASSERT_NE(text.find(bad.find), std::string::npos) << bad.find;
  text.replace(text.find(bad.find), bad.find.size(), bad.replace);
  const auto graph = MlpGraph{.dtype = "float64"}.graph();
  test::expect_error([&] { graph::add_shape(*graph, text, "shape", {}); }, bad.message);
}

INSTANTIATE_TEST_SUITE_P(
    All, BadShapeOfMany,
    ::testing::Values(
        Bad{"NoSizes", "\"sizes\"", "\"lengths\"", {"fields.input.shape[0].size", "no \"sizes\""}},
        Bad{"EntryOfAField", "[{\"size\": 0}, 3]", "[{\"size\": 3}, 3]", {"shape[0].size", "is 3"}},
        Bad{"SizeOfAField", "[{\"size\": 0}, 3]", "[{\"sizes\": 0}, 3]", {"shape[0]", "no \"size\""}},
        Bad{"RealSize",
            "{\"do\": \"le\", \"of\": [0, 1]}",
            "{\"do\": \"truediv\", \"of\": [0, 1]}",
            {"guards[0].size", "entry 2 is no whole number"}},
        Bad{"GuardWithoutASize", "{\"size\": 2, \"says\"", "{\"sizes\": 2, \"says\"", {"guards[0]", "no \"size\""}},
        Bad{"GuardOfAnEntry", "{\"size\": 2, \"says\"", "{\"size\": 9, \"says\"", {"guards[0].size", "is 9"}},
        Bad{"ConstantOfATable", "{\"constant\": \"scale\"", "{\"constant\": \"c9\"", {"no constant \"c9\"", "table 0"}},
        Bad{"SlotOfATable", "\"slot\": 1}]", "\"slot\": 2}]", {"tables[0].slot"}},
        Bad{"UnwrittenTable",
            "\"out\": [1]}], \"slot\": 1}]",
            "\"out\": [null]}], \"slot\": 1}]",
            {"tables[0].slot", "slot 1 is read"}},
        Bad{"OperatorOfATable",
            "\"aten::mul.Tensor\", \"args\": [{\"v\": 0}, {\"number\"",
            "\"aten::rand\", \"args\": [{\"v\": 0}, {\"number\"",
            {"tables[0].code[0]"}},
        Bad{"TableOfALayer", "[[], [{\"table\": 0}]", "[[], [{\"table\": 1}]", {"constants[1][0].table", "is 1"}},
        Bad{"Count", "\"count\": {\"size\": 0}", "\"count\": {\"size\": 5}", {"targets.count.size", "is 5"}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(ShapesOfMany, TheFirstShapeIsFixed) {
  std::string text = MlpGraph{.dtype = "float64"}.json();
  const size_t at = text.find("\"shapes\": [") + 11;
  const std::string fixed = text.substr(at, text.size() - at - 2);
  const std::string first = text.substr(0, at) + of_many() + ", " + fixed + "]}";
  const std::string second = text.substr(0, at) + fixed + ", " + of_many() + "]}";
  const graph::Tensors constants = MlpGraph{.dtype = "float64"}.constants();
  test::expect_error([&] { graph::parse_graph(first, "graph.json", constants); }, {"shapes[0]", "first shape"});
  const auto graph = graph::parse_graph(second, "graph.json", constants);
  EXPECT_EQ(graph->count_targets(fields_of(6)), 6);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
