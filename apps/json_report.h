// JSON output of the program: a step of training, and the machine it ran on.
#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "twobp/train/trainer.h"

namespace twobp {

// One line of --metrics. `held_out`: the evaluation after the step, if there was one.
nlohmann::json step_to_json(const StepResult& result, const std::optional<Evaluation>& held_out);

// CPU model, cores, kernels. A measurement is worthless without them.
nlohmann::json machine_to_json();

// Idle seconds of a rank by cause.
nlohmann::json idle_to_json(const RankTimes& times);

// Writes text to a file; throws Error naming it.
void write_text(const std::string& path, const std::string& text);

}  // namespace twobp
