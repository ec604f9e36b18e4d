// The input is a cost model. If it is accepted, it is written and read again, and the costs of stages are computed.
#include "twobp/plan/cost_model.h"

#include "fuzz/input.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto read = fuzz::accepted([&] { return parse_cost_model(fuzz::text(data, size), "fuzz.json"); });
  if (!read) return 0;
  const std::string written = cost_model_to_json(*read);
  fuzz::require(cost_model_to_json(parse_cost_model(written, "again.json")) == written,
                "a cost model changes when it is written and read again");
  const int sizes[] = {1, read->micro_batch_sizes.back()};
  for (const int size_of_one : sizes) {
    const std::vector<int> split = {static_cast<int>(read->layers.size())};
    stage_costs(*read, split, size_of_one);
    for (const auto& lengths : read->slice_lengths) {
      const int slices = static_cast<int>(lengths.size());
      if (has_slices(*read, slices)) stage_costs(*read, split, size_of_one, slices);
    }
  }
  return 0;
}
