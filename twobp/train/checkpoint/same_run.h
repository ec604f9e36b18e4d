// Whether a run may go on from a checkpoint: which settings must be the same so that it continues to the bit,
// which may be changed on purpose, and which do not matter.
#pragma once

#include <string>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/train/config.h"
#include "twobp/train/variant.h"

namespace twobp {

// What a checkpoint remembers of the run that wrote it.
struct RunFacts {
  std::string config;   // JSON, every key, defaults that depend on other keys filled in
  std::string data;     // fingerprint of the training data: number of samples and a checksum of some
  std::string kernels;  // instruction set of our CPU kernels
  std::string order{};  // empty: of micro-batches; else of a schedule that gives it up, its checksum
};

// Reads a few samples.
RunFacts facts_of_run(const Config& config, const Dataset& train, const Variant& variant = {});

// Must be the same: the model, the data (number of samples and a checksum of 16 of
// them; the files may have moved), the seed, the precision, the
// batch (of all data-parallel replicas together) and the type of optimizer; Error names what differs.
// Allowed: everything that does not change a result, and optimizer.lr and the like, train.steps, threads,
// another CPU, a schedule that gives up the order of micro-batches: for those, notes.
std::vector<std::string> check_same_run(const RunFacts& saved, const RunFacts& now);

}  // namespace twobp
