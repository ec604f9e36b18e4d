// Checks before training starts: contradictions between keys of several sections, and the facts that all processes of a
// run must share.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/models/model.h"
#include "twobp/schedule/schedule_source.h"
#include "twobp/train/config.h"
#include "twobp/transport/processes.h"

namespace twobp {

// Throws Error. Checks that need the data or the model itself (token ids, more stages than layers) are made where these
// are available.
void check_contradictions(const Config& config);
// The same for a run with data of the caller's own.
void check_contradictions_without_data(const Config& config);

// Throws Error if the configuration cannot train with so many slices (pipeline.slices), whatever the schedule.
void check_slices(const Config& config, int slices);

// Throws Error if replicas that share experts (pipeline.experts), which exchange the tokens of every micro-batch, would
// have different numbers of micro-batches.
void check_whole_batches(const Config& config, int micro_batches, const DataSplit& data);

// Throws Error if replicas share experts, but no layer of the replica's model has such.
void check_experts_of_model(const Config& config, const ModelSpec& model);

// Compares, before training starts, the facts that all processes of a run must share. A process with another
// configuration, program or data would train another model without any error.

// Names and this process's values: ("pipeline.p2", "fill").
using Facts = std::vector<std::pair<std::string, std::string>>;

// Facts that are known at the start: this program and LibTorch, the CPU's kernels, and the configuration. Keys that
// change no result are left out (reader threads, pinning, progress lines), and so are paths, which may differ between
// machines.
Facts facts_of_program(const Config& config);
// The model's layers and parameters, and the schedule's cells if it comes from a file.
Facts facts_of_model(const ModelSpec& model, const ScheduleSource& schedule);
// The number of samples, and a checksum of some of them.
Facts facts_of_data(const Config& config, const DataSplit& data);

// Called by all processes. If two differ, throws the same Error on all. It names the first few facts that differ, and
// for each the process of lowest rank that disagrees with rank 0.
void check_agreement(const Processes& processes, const Facts& facts);

}  // namespace twobp
