// The input is the text form of a schedule. If it is accepted, it is written, read again and simulated.
#include "fuzz/input.h"
#include "twobp/schedule/csv.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/simulate.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto read = fuzz::accepted([&] { return from_csv(fuzz::text(data, size), "fuzz.csv"); });
  if (!read) return 0;
  const Schedule again = from_csv(to_csv(*read), "again.csv");
  fuzz::require(again.ranks == read->ranks && again.rank_of_stage == read->rank_of_stage,
                "a schedule changes when it is written and read again");
  simulate(add_communication(*read), std::vector<StageCost>(static_cast<size_t>(read->stages)));
  return 0;
}
