// The whole library.
#pragma once

#include "twobp/models/decoder/decoder.h"
#include "twobp/nn/check_layer.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/csv.h"
#include "twobp/schedule/draw/grid.h"
#include "twobp/schedule/draw/svg.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/trace/trace.h"
#include "twobp/train/config.h"
#include "twobp/train/trainer.h"
#include "twobp/train/weights/load_model.h"
#include "twobp/train/weights/save_model.h"
