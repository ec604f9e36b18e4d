// JSON output of the program: a step of training, and the machine it ran on.
#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "twobp/train/trainer.h"

namespace twobp {

// Returns one line of --metrics. `held_out` is the evaluation after the step, if there was one.
nlohmann::json step_to_json(const StepResult& result, const std::optional<Evaluation>& held_out);

// Returns the CPU model, the cores and the kernels. A measurement is worthless without them.
nlohmann::json machine_to_json();

// Returns the idle seconds of a rank by cause.
nlohmann::json idle_to_json(const RankTimes& times);

}  // namespace twobp
