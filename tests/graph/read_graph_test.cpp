// Tests graph.json: each error in it gives one message.
#include "twobp/graph/read_graph.h"

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "tests/graph/mlp_graph.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::MlpGraph;

TEST(ReadGraph, ReadsLayersAndShapes) {
  const auto graph = MlpGraph().graph();
  ASSERT_EQ(graph->layers().size(), 4u);
  EXPECT_EQ(graph->layers()[2].name, "middle.1");
  EXPECT_EQ(graph->layers()[2].parameters[0].names, std::vector<std::string>{"middle.0.weight"});
  EXPECT_EQ(graph->description().kinds, (std::vector<std::string>{"first", "middle", "last"}));
  EXPECT_EQ(graph->shape().fields.at("input").sizes, (std::vector<int64_t>{4, 3}));
}

struct Bad {
  const char* name;
  std::string find;
  std::string replace;
  std::vector<std::string> message;
};

class BadGraph : public ::testing::TestWithParam<Bad> {};

TEST_P(BadGraph, IsRefused) {
  const Bad& bad = GetParam();
  std::string text = MlpGraph().json();
  const size_t at = text.find(bad.find);
  ASSERT_NE(at, std::string::npos) << bad.find;
  text.replace(at, bad.find.size(), bad.replace);
  std::vector<std::string> message = bad.message;
  message.emplace_back("graph.json");
  test::expect_error([&] { graph::parse_graph(text, "graph.json", MlpGraph().constants()); }, message);
}

const std::string kRelu = R"({"op": "aten::relu", "args": [{"v": 4}], "out": [5]})";

INSTANTIATE_TEST_SUITE_P(
    All, BadGraph,
    ::testing::Values(
        Bad{"NotJson", "{", "", {"not JSON"}}, Bad{"Format", "twobp graph", "onnx", {"format"}},
        Bad{"Version", "\"version\": 1", "\"version\": 3", {"version", "reads version 1 to 2"}},
        Bad{"Torch", "\"" TORCH_VERSION "\"", "\"2.11\"", {"captured with torch 2.11", "capture it again"}},
        Bad{"MissingKey", "\"kinds\"", "\"kind_names\"", {"there is no \"kinds\""}},
        Bad{"Kind", "\"kind\": 1", "\"kind\": 3", {"layers[1].kind", "is 3, outside 0 to 2"}},
        Bad{"TwoLayersOfAName", "\"name\": \"middle.1\"", "\"name\": \"middle.0\"", {"two layers \"middle.0\""}},
        Bad{"UnknownParameter",
            "[\"first.weight\"",
            "[\"second.weight\"",
            {"layers[0]", "no parameter \"second.weight\""}},
        Bad{"PackedOfOtherColumns",
            "[\"first.weight\", \"first.bias\"]",
            "[[\"first.weight\", \"first.bias\"]]",
            {"layers[0].parameters[0]", "cannot be stacked below"}},
        Bad{"ProjectionsOfOtherOutputs",
            "\"shape\": [5, 3],",
            "\"shape\": [5, 3], \"product\": {\"outputs\": [2, 2]},",
            {"product.outputs", "they are 4 in all groups, but the parameter has 5"}},
        Bad{"ProjectionsOfAVector",
            "\"shape\": [5],",
            "\"shape\": [5], \"product\": {\"outputs\": [5]},",
            {"product", "1 dimensions, not two"}},
        Bad{"PackedTwice",
            "[\"first.weight\", \"first.bias\"]",
            "[[\"first.weight\", \"first.weight\"], \"first.bias\"]",
            {"layers[0].parameters[0]", "is there twice"}},
        Bad{"PackedOfNothing",
            "[\"first.weight\", \"first.bias\"]",
            "[[], \"first.weight\", \"first.bias\"]",
            {"layers[0].parameters[0]", "there is no name"}},
        Bad{"PositionsOfNoSequence",
            "[{\"v\": 2}, {\"v\": 0}, {\"v\": 3}, 1, 1]",
            "[{\"v\": 2}, {\"v\": 0}, {\"v\": 3}, 1, {\"positions\": 1}]",
            {"args[4]", "no \"float\""}},
        Bad{"PositionsOfOtherFields",
            "\"programs\":",
            "\"positions\": 3, \"programs\":",
            {"shapes[0].positions", "the field \"target\"", "(samples, positions, ...)"}},
        Bad{"UnknownConstant", "\"scale\"", "\"scales\"", {"no constant \"scales\"", "middle.0"}},
        Bad{"TwiceBuffer",
            "\"buffers\": [\"middle.1.mean\"]",
            "\"buffers\": [\"middle.0.mean\"]",
            {"belongs to another layer too"}},
        Bad{"OtherShapeOfAKind",
            "\"middle.1.bias\": {\"dtype\": \"float32\", \"shape\": [5]",
            "\"middle.1.bias\": {\"dtype\": \"float32\", \"shape\": [6]",
            {"layers[2]", "other shapes", "middle.0"}},
        Bad{"Dtype",
            "\"float32\", \"shape\": [5, 3]",
            "\"complex64\", \"shape\": [5, 3]",
            {"parameters.first.weight.dtype", "\"complex64\" is not a known dtype"}},
        Bad{"IntegerParameter",
            "\"float32\", \"shape\": [5, 3]",
            "\"int64\", \"shape\": [5, 3]",
            {"capture the module in float32, float64 or bfloat16"}},
        Bad{"DtypesOfOtherParameters",
            "\"parameters\": [\"first.weight\", \"first.bias\"]",
            "\"parameters\": [\"first.weight\", \"first.bias\"], \"dtypes\": [\"bfloat16\"]",
            {"layers[0].dtypes", "1 dtypes for 2 parameters"}},
        Bad{"WiderDtype",
            "\"parameters\": [\"first.weight\", \"first.bias\"]",
            "\"parameters\": [\"first.weight\", \"first.bias\"], \"dtypes\": [\"float64\", \"float32\"]",
            {"layers[0].dtypes[0]", "\"first.weight\" is Float and cannot be read as Double", "only float32"}},
        Bad{"UnknownPrecision",
            "\"layers\":",
            "\"precision\": \"int8\", \"layers\":",
            {"precision", "is \"int8\", but must be \"bf16\" or \"fp16\""}},
        Bad{"NegativeSize", "\"shape\": [5, 3]", "\"shape\": [-5, 3]", {"shape[0]", "is -5"}},
        Bad{"HugeSize", "\"shape\": [5, 3]", "\"shape\": [1000000000, 1000000000]", {"elements"}},
        Bad{"UnknownOperator",
            kRelu,
            R"({"op": "aten::save", "args": [], "out": []})",
            {"forward[2].op", "\"aten::save\" is not on the list"}},
        Bad{"InPlaceOperator", "aten::relu", "aten::relu_", {"\"aten::relu_\" is not on the list"}},
        Bad{"OutVariant", "aten::relu", "aten::relu.out", {"\"aten::relu.out\" changes its arguments"}},
        Bad{"UnknownOverload", "aten::relu", "aten::relu.fast", {"no operator \"aten::relu.fast\""}},
        Bad{"OtherNamespace", "aten::relu", "prims::relu", {"not on the list"}},
        Bad{"ArgumentCount",
            kRelu,
            R"({"op": "aten::relu", "args": [{"v": 4}, 1], "out": [5]})",
            {"forward[2].args", "has 2 arguments, but aten::relu has 1"}},
        Bad{"ArgumentType",
            "[{\"v\": 2}, {\"v\": 0}, {\"v\": 3}, 1, 1]",
            "[{\"v\": 2}, {\"v\": 0}, {\"v\": 3}, \"one\", 1]",
            {"args[3]", "not a number"}},
        Bad{"TensorArgument",
            "\"args\": [{\"v\": 4}], \"out\": [5]",
            "\"args\": [4], \"out\": [5]",
            {"args[0]", "is not an object"}},
        Bad{"SlotRange",
            kRelu,
            R"({"op": "aten::relu", "args": [{"v": 10}], "out": [5]})",
            {"args[0].v", "is 10, outside 0 to 9"}},
        Bad{"ReadsNothing",
            kRelu,
            R"({"op": "aten::relu", "args": [{"v": 7}], "out": [5]})",
            {"slot 7 is read, but nothing"}},
        Bad{"WritesTwice",
            kRelu,
            R"({"op": "aten::relu", "args": [{"v": 4}], "out": [4]})",
            {"slot 4 is written a second time"}},
        Bad{"TooManyResults",
            kRelu,
            R"({"op": "aten::relu", "args": [{"v": 4}], "out": [5, 8]})",
            {"has 2 slots, but the operator has 1 results"}},
        Bad{"NoList",
            kRelu,
            R"({"op": "aten::relu", "args": [{"v": 4}], "out": [5], "list": true})",
            {"returns no list"}},
        Bad{"UnseededRandom",
            kRelu,
            R"({"op": "aten::bernoulli", "args": [{"v": 4}, null], "out": [5]})",
            {"args[1]", "is not an object"}},
        Bad{"RandomInBackward",
            R"({"op": "aten::mul.Tensor", "args": [{"v": 14}, {"v": 10}], "out": [15]})",
            R"({"op": "twobp::dropout", "args": [{"v": 14}, 0.5, {"random": 1}], "out": [15, null]})",
            {"backward_p1[0]", "only forward and evaluate"}},
        Bad{"GradientInForward",
            kRelu,
            R"({"add_to": 0, "how": "sum", "args": [{"v": 4}]})",
            {"forward[2]", "only backward_p1 and backward_p2"}},
        Bad{"HowToAdd", "\"how\": \"product\"", "\"how\": \"power\"", {"how", "\"power\""}},
        Bad{"NothingOfSomething",
            R"({"add_to": 1, "how": "sum", "args": [{"v": 8}]})",
            R"({"add_to": 1, "how": "nothing", "args": [{"v": 8}]})",
            {"has 1 arguments instead of 0"}},
        Bad{"Predictions",
            R"({"slot": 10, "gradient": 11})",
            R"({"slot": 10, "gradient": 11}, {"slot": 7})",
            {"the last layer must have one output, the loss"}},
        Bad{"GradientRange",
            "\"add_to\": 0, \"how\": \"product\", \"args\": [{\"v\": 9}",
            "\"add_to\": 2, \"how\": \"product\", \"args\": [{\"v\": 9}",
            {"layer \"first\"", "adds to the gradient of parameter 2"}},
        Bad{"NoGradient",
            R"({"add_to": 1, "how": "sum", "args": [{"v": 8}]})",
            R"({"add_to": 0, "how": "sum", "args": [{"v": 8}]})",
            {"\"first.bias\" gets no gradient"}},
        Bad{"UnknownField", "\"name\": \"input\", \"slot\"", "\"name\": \"inputs\", \"slot\"", {"no field \"inputs\""}},
        Bad{"UnknownPlace", "\"from\": \"loss_weight\"", "\"from\": \"file\"", {"from", "\"file\""}},
        Bad{"ValueRange",
            "{\"from\": \"value\", \"index\": 0",
            "{\"from\": \"value\", \"index\": 1",
            {"reads value 1, but there are only 1"}},
        Bad{"InputGradients",
            R"("input_gradients": [{"index": 0, "slot": 22}])",
            R"("input_gradients": [])",
            {"layer \"middle.0\"", "input_gradients"}},
        Bad{"LossWithoutGradient", R"({"slot": 10, "gradient": 11})", R"({"slot": 10})", {"nothing has been written"}},
        Bad{"Targets", R"("slot": 3}})", R"("slot": 4}})", {"targets.slot"}},
        Bad{"CheckOfTargets",
            R"("slot": 3}})",
            R"("slot": 3, "checks": [{"slot": 4, "says": ""}]}})",
            {"targets.checks[0].slot"}},
        Bad{"Depth",
            "\"args\": [{\"v\": 4}]",
            "\"args\": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]",
            {"nested deeper"}}),
    [](const auto& info) { return std::string(info.param.name); });

// With sequences of 2 positions, in a field and an argument.
std::string with_positions(const std::string& positions, const std::string& argument) {
  std::string text = MlpGraph().json();
  const auto replace = [&](const std::string& find, const std::string& by) {
    const size_t at = text.find(find);
    ASSERT_NE(at, std::string::npos) << find;
    text.replace(at, find.size(), by);
  };
  replace("\"shape\": [4, 3]", "\"shape\": [4, 2]");
  replace("\"programs\":", positions + "\"programs\":");
  replace(kRelu, R"({"op": "aten::slice.Tensor", "args": [{"v": 4}, 0, null, )" + argument + R"(, 1], "out": [5]})");
  return text;
}

TEST(ReadGraph, NumbersDependOnPositions) {
  const auto last = [](const std::string& argument) {
    const auto graph =
        graph::parse_graph(with_positions("\"positions\": 2, ", argument), "graph.json", MlpGraph().constants());
    const graph::Argument& end = graph->shape().programs[0].forward[2].arguments[3];
    EXPECT_EQ(end.of_positions.size(), 1u);
    return std::pair(end.value.toInt(), end.of_positions.at(0).value(/*begin=*/7, /*length=*/5));
  };
  EXPECT_EQ(last(R"({"positions": 3})"), (std::pair<int64_t, int64_t>(6, 15)));
  EXPECT_EQ(last(R"({"position": "begin"})"), (std::pair<int64_t, int64_t>(0, 7)));
  EXPECT_EQ(last(R"({"position": "end"})"), (std::pair<int64_t, int64_t>(2, 12)));
  const auto refused = [](const std::string& positions, const std::string& argument,
                          const std::vector<std::string>& message) {
    test::expect_error(
        [&] { graph::parse_graph(with_positions(positions, argument), "graph.json", MlpGraph().constants()); },
        message);
  };
  refused("", R"({"positions": 3})", {"args[3]", "no number of positions"});
  refused("\"positions\": 2, ", R"({"position": "middle"})", {"args[3]", "\"middle\" is not a known position"});
  refused("\"positions\": 2, ", R"({"positions": 0})", {"args[3]", "outside 1"});
  refused("\"positions\": 2, \"no_slices\": \"why\", ", "1", {"positions", "\"no_slices\" is given too"});
}

TEST(ReadGraph, RefusesADamagedSecondShape) {
  const auto graph = MlpGraph().graph();
  std::string shape = MlpGraph().shape(2);
  shape.replace(shape.find("aten::relu"), 10, "aten::save");
  test::expect_error([&] { graph::add_shape(*graph, shape, "shape", {}); }, {"shape: programs[0].forward[2].op"});
  graph::add_shape(*graph, MlpGraph().shape(2), "shape", {});
  graph::add_shape(*graph, MlpGraph().shape(2), "shape", {});  // it is there already
  EXPECT_TRUE(graph->knows({{"input", {at::kFloat, {2, 3}}}, {"target", {at::kFloat, {2, 2}}}}, /*variant=*/0));
}

// An error during a run names the instruction.
TEST(ReadGraph, RunTimeErrorsNameTheInstruction) {
  std::string text = MlpGraph().json();
  const std::string code = R"("code": [{"op": "aten::select.int", "args": [{"v": 0}, 1, 0])";
  ASSERT_NE(text.find(code), std::string::npos);
  text.replace(text.find(code), code.size(), R"("code": [{"op": "aten::select.int", "args": [{"v": 0}, 5, 0])");
  const auto graph = graph::parse_graph(text, "graph.json", MlpGraph().constants());
  test::expect_error(
      [&] {
        graph->count_targets({{"input", at::zeros({4, 3})}, {"target", at::zeros({4, 2})}});
      },
      {"shapes[0].targets.code[0], aten::select.int", "Dimension out of range"});
}

// The graph whose count is 8 with the checks. Slot 2 says whether no target is negative.
std::string with_checks(const std::string& checks) {
  std::string text = MlpGraph().json();
  const size_t targets = text.find("\"targets\"");
  return text.replace(targets, text.find("}}", targets) + 1 - targets,
                      R"("targets": {"count": 8, "slots": 3, "inputs": [{"from": "field", "name": "target", "slot": 0}],
      "code": [{"op": "aten::ge.Scalar", "args": [{"v": 0}, 0], "out": [1]}, {"op": "aten::all", "args": [{"v": 1}], "out": [2]}],
      "checks": [)" + checks +
                          "]}");
}

// A count may be a number if there are checks.
TEST(ReadGraph, ChecksOfTargetsRunForEachMicroBatch) {
  const auto count = [](const std::string& checks, double target) {
    const Fields fields{{"input", at::zeros({4, 3})}, {"target", at::full({4, 2}, target)}};
    return graph::parse_graph(with_checks(checks), "graph.json", MlpGraph().constants())->count_targets(fields);
  };
  const std::string positive = R"({"slot": 2, "says": "a target is negative"})";
  EXPECT_EQ(count(positive, 1), 8);
  test::expect_error([&] { count(positive, -1); }, {"a micro-batch", "a target is negative"});
  test::expect_error([&] { count(R"({"slot": 1, "says": ""})", 1); }, {"a check of the targets", "not one bool"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
