// Where training data comes from: a Dataset is a list of sequences, a Batch is what one optimizer step reads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/nn/context.h"
#include "twobp/train/config.h"

namespace twobp {

// Indexed samples, read from any thread.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;  // samples
  // The fields of the samples at `indices`, stacked: for language models `input_ids` (B, S) int64 and
  // `labels` (B, S) int64, where labels[b, t] is the token that follows position t, -100 where nothing is
  // counted.
  virtual Fields read(const std::vector<int64_t>& indices) const = 0;
};

// The two parts of the configured data; `held_out` is empty (null) when there is none.
struct DataSplit {
  std::shared_ptr<Dataset> train;
  std::shared_ptr<Dataset> held_out;
};
// Text that has a tokenizer is encoded now, or was before: see tokenize_text.
// Throws Error: nothing matches the glob, file unreadable, too little text for one sequence, arrays of the
// wrong shape or dtype, token ids outside [0, vocab) (file and position named), and what tokenize_text
// throws.
DataSplit open_data(const DataConfig& data, const ModelConfig& model, uint64_t seed);

// The tokenizer.json of data.text: what data.tokenizer names or, without that, the one in the folder
// model.from. Empty: there is none, and tokens are bytes.
std::string tokenizer_of(const DataConfig& data, const ModelConfig& model);

// The micro-batches of one optimizer step. The last batch of an epoch may have fewer micro-batches, and the
// last of them fewer samples.
struct Batch {
  std::vector<Fields> micro_batches;
  int64_t targets = 0;  // labels counted (not -100) in all of them; samples where there are no labels
  int64_t tokens = 0;   // input positions in all of them; samples where there are no tokens
};

// The sample order of epoch `epoch`: 0..size-1, shuffled by (seed, epoch) if asked.
std::vector<int64_t> epoch_order(int64_t size, bool shuffle, uint64_t seed, int64_t epoch);

// Reads the samples at `indices`, in that order, cut into micro-batches of `micro_batch_size`; the last one
// has what is left.
Batch read_batch(const Dataset& dataset, const std::vector<int64_t>& indices, int64_t micro_batch_size);

// A thread that reads batches ahead of the training loop, in order, over as many epochs as are asked for.
class Loader {
 public:
  // `first_batch` counts from the beginning of the first epoch: a loader that starts there gives the very
  // batches that one from 0 gives from there on.
  Loader(std::shared_ptr<const Dataset> dataset, int64_t micro_batches, int64_t micro_batch_size,
         bool shuffle, uint64_t seed, int64_t read_ahead = 2, int64_t first_batch = 0);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next batch. Rethrows what the thread ran into.
  Batch next();
  int64_t batches_per_epoch() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace twobp
