// Checks whether a run may resume from a checkpoint. Some settings must be the same so that the run continues to the
// bit. Some may be changed on purpose, and the rest do not matter.
#pragma once

#include <string>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/train/config.h"
#include "twobp/train/variant.h"

namespace twobp {

// The facts that a checkpoint holds about the run that wrote it.
struct RunFacts {
  std::string config;   // JSON with every key; defaults that depend on other keys are filled in
  std::string data;     // fingerprint of the training data: the number of samples and a checksum of some
  std::string kernels;  // instruction set of our CPU kernels
  std::string order{};  // empty if the schedule keeps the order of micro-batches, otherwise its checksum
};

// Reads a few samples.
RunFacts facts_of_run(const Config& config, const Dataset& train, const Variant& variant = {});

// Throws Error that names the difference if one of these differs: the model, the data (the number of samples and a
// checksum of 16 of them; the files may have moved), the seed, the precision, the batch (of all data-parallel replicas
// together) or the type of optimizer. Everything that does not change a result may differ. So may optimizer.lr and the
// like, train.steps, threads, the CPU, and a schedule that gives up the order of micro-batches, but these give notes.
std::vector<std::string> check_same_run(const RunFacts& saved, const RunFacts& now);

}  // namespace twobp
