// The trainer's state for steps, private to its sources.
#pragma once

#include "twobp/pipeline/step_input.h"
#include "twobp/train/trainer.h"
#include "twobp/train/update/update.h"

namespace twobp {

struct Trainer::StepUnderWay {
  Batch batch;
  int64_t targets = 0;  // counted labels of all replicas
  StepResult result;
  UpdateResult update;
  bool may_give_up = false;
  bool from_loader = false;
};

struct Trainer::KeptSetup {
  ScheduleSource schedule;  // keeps a schedule from a file alive, because its address is part of the key
  StepSetup setup;
};

}  // namespace twobp
