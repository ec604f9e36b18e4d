// The input is the graph.json of a captured model whose constants are there. What is accepted is planned, but not run.
// Every plan keeps values that its passes have.
#include "fuzz/input.h"
#include "twobp/graph/read_graph.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto graph = fuzz::accepted([&] {
    return graph::parse_graph({reinterpret_cast<const char*>(data), size}, "graph.json", {{"scale", at::ones({5})}});
  });
  if (!graph) return 0;
  const graph::Shape& shape = (*graph)->shape();
  fuzz::require(shape.programs.size() == (*graph)->description().kinds.size(), "a kind has no program");
  for (size_t i = 0; i < (*graph)->layers().size(); ++i) {
    const graph::GraphLayer& layer = (*graph)->layers()[i];
    const graph::Plan& plan =
        (*graph)->plan(shape, static_cast<int>(i), std::vector<bool>(layer.parameters.size(), true));
    const auto in_range = [&](int slot) {
      fuzz::require(slot >= 0 && slot < plan.program->slots, "a slot is out of range");
    };
    for (const int slot : plan.until_p1) in_range(slot);
    for (const graph::Plan::Unit& unit : plan.units) {
      for (const int slot : unit.from_forward) in_range(slot);
      for (const int slot : unit.from_p1) in_range(slot);
    }
    for (const graph::Instruction& one : plan.forward.code) graph::for_each_read(one, in_range);
  }
  return 0;
}
