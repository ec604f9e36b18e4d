// The library for a program: models, data, training, schedules. Layers and single parts have headers of their own
// beside this one.
#pragma once

#include "twobp/models/decoder/options.h"
#include "twobp/nn/check_layer.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/train/checkpoint/checkpointer.h"
#include "twobp/train/config.h"
#include "twobp/train/trainer.h"
#include "twobp/train/weights/save_model.h"
