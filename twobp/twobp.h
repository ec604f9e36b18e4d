// The whole library.
#pragma once

#include "twobp/nn/models/llama.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/schedule/generators.h"
#include "twobp/schedule/grid.h"
#include "twobp/schedule/simulate.h"
#include "twobp/schedule/validate.h"
#include "twobp/trace/timeline.h"
#include "twobp/trace/trace.h"
#include "twobp/train/config.h"
#include "twobp/train/load_model.h"
#include "twobp/train/save_model.h"
#include "twobp/train/trainer.h"
