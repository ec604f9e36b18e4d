// Everything that a run is told: one JSON file, a section for each struct here. Each section's owner lists
// its keys, with a default, a type and a unit.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "twobp/config/section.h"
#include "twobp/data/data_config.h"
#include "twobp/models/model_config.h"
#include "twobp/pipeline/pipeline_config.h"
#include "twobp/train/update/optimizer_config.h"

namespace twobp {

struct TrainConfig {
  int64_t steps = 100;
  uint64_t seed = 1;
  double clip_norm = 0.0;          // 0: no clipping
  int64_t eval_every = 0;          // steps; 0: only at the end, if there is held-out data
  int64_t eval_batches = 16;       // most held-out batches an evaluation reads; 0: all
  int64_t log_every = 1;           // steps between progress lines when the output is no terminal
  std::string precision = "fp32";  // of the compute: fp32, bf16, fp16; the rest stays fp32
  double loss_scale = 65536;       // fp16: the first one
};

struct SaveConfig {
  std::string model;  // folder for config.json and model.safetensors after the last step; empty: none
  std::string dtype = "float32";  // of the saved weights
  std::string lora = "merged";    // merged into the weights, or adapter: PEFT's files alone
  std::string checkpoints;        // folder; empty: none
  int64_t every = 100;            // steps between checkpoints
  int64_t keep = 3;               // the last so many are kept
};

struct Config {
  ModelConfig model;
  DataConfig data;
  PipelineConfig pipeline;
  OptimizerConfig optimizer;
  TrainConfig train;
  SaveConfig save;
};

// The defaults, then the file (unless empty), then each "section.key=value" in turn, then the architecture of
// model.from if it is set; checked by check_config. Throws Error: unreadable file, JSON syntax (line and
// column), unknown key (naming the nearest), wrong type, a key that contradicts model.from.
Config load_config(const std::string& path, const std::vector<std::string>& overrides);
// The same from JSON text; `origin` names it in messages.
Config parse_config(const std::string& json, const std::string& origin,
                    const std::vector<std::string>& overrides);

// Contradictions and values out of range: dim not divisible by heads, both data.text and data.arrays, and so
// on.
void check_config(const Config& config);

// The whole configuration as JSON, every key there: what --print-config prints.
std::string config_to_json(const Config& config);
// A line per key: name, type, default, unit and what it means: what --help shows.
std::string config_reference();

// Calls visit(full name, key, values) for each key of the configuration, in order.
void for_each_key(const Config& config,
                  const std::function<void(const std::string& name, const Key& key, void* values)>& visit);

}  // namespace twobp
