// The trainer's state, private to its sources.
#pragma once

#include "twobp/pipeline/step_plan.h"
#include "twobp/train/trainer.h"
#include "twobp/train/update/rates.h"
#include "twobp/train/update/update.h"
#include "twobp/train/variant.h"

namespace twobp {

struct Trainer::StepUnderWay {
  Batch batch;
  std::vector<Fields> next;  // StepRequest::next
  int64_t targets = 0;       // counted labels of all replicas
  StepResult result;
  UpdateResult update;
  bool may_give_up = false;
  bool from_loader = false;
};

// A batch that was read before its step begins, so that replicas count its labels with the sums of the step before, or
// that frozen stages run F for it in that step.
struct Trainer::NextBatch {
  Batch batch;
  bool counted = false;
  int64_t targets = 0;  // of all replicas
  int64_t tokens = 0;
  double late_by = 0;  // seconds after the end of the step before
};

struct Trainer::KeptPlan {
  Variant variant;
  int micro_batches = 0;
  StepPlan plan;
};

}  // namespace twobp
