// The complete configuration of a run: one JSON file with a section for each struct here. Each section's owner lists
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

namespace twobp {

// The section `optimizer` of the configuration.
struct OptimizerConfig {
  std::string type = "adamw";  // adamw, adam, sgd, muon
  double lr = 3e-4;
  double weight_decay = 0.01;
  std::vector<std::string> groups = {};  // PATTERN KEY=VALUE...: see parameter_groups.h
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0.0;            // sgd
  double muon_momentum = 0.95;      // muon
  double average = 0;               // decay of the running mean of the weights; 0: none
  bool shard = false;               // data parallel: each replica keeps and updates its share (ZeRO stage 1)
  std::string schedule = "cosine";  // constant, linear, cosine, wsd, inverse_sqrt
  int64_t warmup = 0;               // steps
  int64_t decay = 0;                // wsd: steps of the fall at the end; 0: a tenth of the run
  double min_lr = 0.0;              // final rate of linear, cosine and wsd
};

const Section& optimizer_section();

struct TrainConfig {
  int64_t steps = 100;
  uint64_t seed = 1;
  double clip_norm = 0.0;          // 0: no clipping
  int64_t eval_every = 0;          // in steps; 0: only at the end, if there is held-out data
  int64_t eval_batches = 16;       // largest number of held-out batches in an evaluation; 0: all
  int64_t log_every = 1;           // steps between progress lines if the output is not a terminal
  std::string precision = "fp32";  // of the computation: fp32, bf16, fp16; the rest stays fp32
  double loss_scale = 65536;       // fp16: the initial scale
};

struct SaveConfig {
  std::string model;              // folder for config.json and model.safetensors after the last step; empty: none
  std::string dtype = "float32";  // of the saved weights
  std::string lora = "merged";    // merged: into the weights; adapter: only PEFT's files
  std::string checkpoints;        // folder; empty: none
  int64_t every = 100;            // steps between checkpoints
  int64_t keep = 3;               // number of checkpoints to keep
};

struct Config {
  ModelConfig model;
  DataConfig data;
  PipelineConfig pipeline;
  OptimizerConfig optimizer;
  TrainConfig train;
  SaveConfig save;
};

// Reads the defaults, then the file (unless empty), then each "section.key=value" in turn, then the architecture of
// model.from if it is set. The result is checked by check_config. Throws Error for an unreadable file, JSON syntax
// (line and column), an unknown key (naming the nearest), a wrong type, a key that contradicts model.from, or a key of
// the data that its source does not use.
Config load_config(const std::string& path, const std::vector<std::string>& overrides);
// The same from JSON text, but unused keys of the data are allowed. `origin` names the text in messages.
Config parse_config(const std::string& json, const std::string& origin, const std::vector<std::string>& overrides);

// For a trainer with data of the caller's own: the sections model, pipeline, optimizer and train. `model` takes the
// place of the section of that name. The pipeline does not run ahead unless the text says so, because the caller hands
// over each batch. Throws Error as load_config does.
Config parse_config_without_data(const std::string& json, const std::string& origin,
                                 const ModelOptions* model = nullptr);

// Throws Error for contradictions and values out of range: dim not divisible by heads, both data.text and data.arrays,
// and so on.
void check_config(const Config& config);

// The whole configuration as JSON with every key, as --print-config prints it.
std::string config_to_json(const Config& config);
// One line per key with its name, type, default, unit and meaning, as --help shows it.
std::string config_reference();

// Calls visit(full name, key, values) for each key of the configuration, in order.
void for_each_key(const Config& config,
                  const std::function<void(const std::string& name, const Key& key, void* values)>& visit);

}  // namespace twobp
