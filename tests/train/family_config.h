// A tiny configuration of a family of decoders.
#pragma once

#include <string>
#include <vector>

#include "tests/train/training.h"
#include "twobp/models/decoder/family.h"

namespace twobp::test {

// Uses the family's features: windows on some layers, layers without rotary embedding, caps, multipliers.
inline Config family_config(const DecoderFamily& family, int stages = 1, const std::vector<std::string>& more = {}) {
  std::vector<std::string> keys = {"model.type=" + family.name,
                                   "model.dim=24",
                                   "model.layers=3",
                                   "model.heads=3",
                                   "model.hidden=40",
                                   concat("model.vocab=", test::kVocab),
                                   "model.init_std=0.2",
                                   "data.synthetic=tokens",
                                   concat("data.sequence=", test::kSequence),
                                   "data.held_out=0",
                                   "pipeline.micro_batches=3",
                                   "pipeline.micro_batch_size=2",
                                   "pipeline.pin=false",
                                   concat("pipeline.stages=", stages),
                                   "optimizer.schedule=constant",
                                   "optimizer.lr=0.01",
                                   "train.steps=2",
                                   "train.clip_norm=1"};
  for (const auto& [option, value] : {std::pair{"kv_heads", "1"}, {"windows", "5,0"},      {"rope_layers", "1,0"},
                                      {"attention_bias", "true"}, {"attention_cap", "2"},  {"logit_cap", "3"},
                                      {"residual_scale", "0.5"},  {"positions", "40"},     {"rope_part", "0.5"},
                                      {"attention_scale", "0.4"}, {"balance_loss", "0.1"}, {"expert_groups", "4"},
                                      {"chosen_groups", "2"},     {"routed_scale", "1.5"}, {"nope_dim", "5"},
                                      {"rope_dim", "4"},          {"value_dim", "6"},      {"q_rank", "7"},
                                      {"kv_rank", "9"},           {"pad_token", "3"},      {"balance_rate", "0.01"}}) {
    const bool one_window = std::string(option) == "windows" && family.windows == WindowsInFile::kEvery;
    if (has_option(family, option)) keys.push_back(concat("model.", option, "=", one_window ? "5" : value));
  }
  keys.insert(keys.end(), more.begin(), more.end());
  return load_config("", keys);
}

}  // namespace twobp::test
