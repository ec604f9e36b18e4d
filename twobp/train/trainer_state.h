// The trainer's state for steps, private to its sources.
#pragma once

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

}  // namespace twobp
