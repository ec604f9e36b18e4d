// What the processes of a run must have alike, compared before training starts: one that was started with
// another configuration, another program or other data would train something else, and nobody would see it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/models/model.h"
#include "twobp/schedule/schedule_source.h"
#include "twobp/train/config.h"
#include "twobp/train/processes.h"

namespace twobp {

// Each with its name, "pipeline.p2", and what this process has, "fill".
using Facts = std::vector<std::pair<std::string, std::string>>;

// Known at once: this program and LibTorch, the CPU's kernels, and every key of the configuration but those
// that change no result (threads that read, pinning, lines of progress) and those that say where something
// is, which may differ from machine to machine.
Facts facts_of_program(const Config& config);
// The model's layers and parameters, and the schedule's cells if it is in a file.
Facts facts_of_model(const ModelSpec& model, const ScheduleSource& schedule);
// How many samples, and a checksum of some.
Facts facts_of_data(const Config& config, const DataSplit& data);

// All processes call it. Throws the same Error on all if two differ, naming the first few facts that do, and
// the process of lowest rank that has it otherwise than rank 0.
void check_agreement(const Processes& processes, const Facts& facts);

}  // namespace twobp
