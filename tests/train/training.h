// The training tests share these helpers: a tiny LLaMa, batches with labels that do not count, a run of a few steps,
// and a bitwise comparison of two runs.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/model_options.h"
#include "twobp/core/check.h"
#include "twobp/core/random.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/trainer.h"
#include "twobp/train/variant.h"

namespace twobp::test {

inline constexpr int64_t kVocab = 64;
inline constexpr int64_t kSequence = 16;
inline constexpr int kLayers = 8;  // of tiny_config's model: embedding, 3 blocks of 2, head

// The model has three blocks, and two query heads for each key-value head. Threads are not pinned, because tests run
// beside each other.
inline Config tiny_config() {
  Config config;
  llama_of(config).dim = 32;
  llama_of(config).layers = 3;
  llama_of(config).heads = 4;
  llama_of(config).kv_heads = 2;
  llama_of(config).hidden = 48;
  llama_of(config).vocab = kVocab;
  llama_of(config).init_std = 0.2;  // far from linear, so that a wrong term shows
  config.data.synthetic = "tokens";
  config.data.sequence = kSequence;
  config.data.held_out = 0;
  config.pipeline.stages = 1;
  config.pipeline.micro_batch_size = 2;
  config.pipeline.pin = false;
  config.pipeline.timeout = 60;
  config.optimizer.lr = 1e-2;
  config.optimizer.schedule = "constant";
  config.train.steps = 3;
  config.train.seed = 7;
  return config;
}

// Makes a micro-batch whose number of counted labels depends on the seed. Its first label counts.
inline Fields random_fields(int64_t samples, uint64_t seed, int64_t sequence = kSequence, int64_t vocab = kVocab) {
  SplitMix64 random(seed);
  at::Tensor ids = at::empty({samples, sequence}, at::kLong);
  at::Tensor labels = at::empty({samples, sequence}, at::kLong);
  const uint64_t share = 1 + bounded(random, 4);  // how many of five labels count
  for (int64_t i = 0; i < samples * sequence; ++i) {
    ids.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(bounded(random, static_cast<uint64_t>(vocab)));
    const auto label = static_cast<int64_t>(bounded(random, static_cast<uint64_t>(vocab)));
    labels.mutable_data_ptr<int64_t>()[i] = i == 0 || bounded(random, 5) < share ? label : -100;
  }
  return {{"input_ids", ids}, {"labels", labels}};
}

inline int64_t counted(const at::Tensor& labels) {
  return labels.ne(-100).sum().item<int64_t>();
}

// The last micro-batch has `last` samples, the others have `samples`.
inline Batch random_batch(int micro_batches, int64_t samples, int64_t last, uint64_t seed) {
  Batch batch;
  for (int m = 0; m < micro_batches; ++m) {
    batch.micro_batches.push_back(random_fields(m + 1 == micro_batches ? last : samples, mix_bits(seed, m)));
    batch.targets += counted(batch.micro_batches.back().at("labels"));
    batch.tokens += batch.micro_batches.back().at("input_ids").numel();
  }
  return batch;
}

// Makes one batch for each step.
inline std::vector<Batch> random_batches(int steps, int micro_batches, int64_t samples = 2) {
  std::vector<Batch> batches;
  for (int i = 0; i < steps; ++i) batches.push_back(random_batch(micro_batches, samples, samples, 100 + i));
  return batches;
}

// Returns the same batches with padding. In every micro-batch except the first of each batch, one sample is padded on
// the left. The last sample has padding within it and on the right. Labels stay, since only data files tie them to the
// mask.
inline std::vector<Batch> padded(std::vector<Batch> batches) {
  int64_t length = 1;
  for (Batch& batch : batches) {
    for (size_t m = 0; m < batch.micro_batches.size(); ++m) {
      const at::Tensor mask = at::ones_like(batch.micro_batches[m].at("input_ids"));
      batch.micro_batches[m]["attention_mask"] = mask;
      if (m == 0) continue;
      const int64_t positions = mask.size(1);
      length = 1 + (length + 4) % (positions / 2);
      mask[0].narrow(0, 0, length).zero_();
      mask[-1].narrow(0, positions - length, length).zero_();
      mask[-1][2].zero_();
    }
  }
  return batches;
}

// These are the results of a training run.
struct Outcome {
  std::vector<double> losses;
  std::vector<double> norms;
  std::vector<at::Tensor> weights;  // in model order
};

inline std::vector<at::Tensor> copies_of(const std::vector<Parameter*>& parameters) {
  std::vector<at::Tensor> copies;
  for (const Parameter* parameter : parameters)
    copies.push_back(parameter->value.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  return copies;
}

// Trains on the trainer's own data until so many steps are done.
inline Outcome train_until(Trainer& trainer, int64_t steps) {
  Outcome outcome;
  while (trainer.steps_done() < steps) {
    const StepResult result = trainer.step();
    outcome.losses.push_back(result.loss);
    outcome.norms.push_back(result.grad_norm);
  }
  outcome.weights = copies_of(trainer.weights());
  return outcome;
}

inline Outcome train(Trainer& trainer, const std::vector<Batch>& batches, const Variant& variant) {
  Outcome outcome;
  for (const Batch& batch : batches) {
    const StepResult result = trainer.step(batch, variant);
    outcome.losses.push_back(result.loss);
    outcome.norms.push_back(result.grad_norm);
  }
  outcome.weights = copies_of(trainer.weights());
  return outcome;
}

inline Outcome train(const Config& config, const std::vector<Batch>& batches, const Variant& variant) {
  Trainer trainer(config);
  return train(trainer, batches, variant);
}

// With SGD and a learning rate of 1, weights move by their gradients.
inline void make_plain_sgd(Config& config) {
  config.optimizer.type = "sgd";
  config.optimizer.lr = 1;
  config.optimizer.weight_decay = 0;
}

struct Gradients {
  StepResult step;
  std::vector<std::string> names;
  std::vector<at::Tensor> weights;    // before
  std::vector<at::Tensor> gradients;  // before - after
};

// Returns the gradients of one step of a configuration with plain SGD.
inline Gradients gradients_of(const Config& config, const Batch& batch, const Variant& variant) {
  Trainer trainer(config);
  Gradients result;
  result.weights = copies_of(trainer.weights());
  result.step = trainer.step(batch, variant);
  for (size_t i = 0; i < trainer.weights().size(); ++i) {
    result.names.push_back(trainer.weights()[i]->name());
    result.gradients.push_back(result.weights[i] - trainer.weights()[i]->value);
  }
  return result;
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(), a.nbytes()) == 0;
}

// Compares doubles as bits, so that -0 and 0 differ and NaN equals itself.
inline bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

// Compares two runs that have losses and norms.
template <typename Run>
void expect_same_numbers(const Run& expected, const Run& actual, const std::string& what) {
  EXPECT_TRUE(same_bits(expected.losses, actual.losses))
      << what << ": losses " << ::testing::PrintToString(actual.losses) << " instead of "
      << ::testing::PrintToString(expected.losses);
  EXPECT_TRUE(same_bits(expected.norms, actual.norms)) << what << ": norms " << ::testing::PrintToString(actual.norms)
                                                       << " instead of " << ::testing::PrintToString(expected.norms);
}

inline void expect_same_bits(const Outcome& expected, const Outcome& actual, const std::string& what) {
  expect_same_numbers(expected, actual, what);
  ASSERT_EQ(expected.weights.size(), actual.weights.size()) << what;
  for (size_t i = 0; i < expected.weights.size(); ++i) {
    EXPECT_TRUE(same_bits(expected.weights[i], actual.weights[i]))
        << what << ": weight " << i << " differs by up to "
        << (expected.weights[i] - actual.weights[i]).abs().max().item<double>();
  }
}

}  // namespace twobp::test
