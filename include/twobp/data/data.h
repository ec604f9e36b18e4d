// The source of training data. A Dataset is a list of samples; a Batch is what one optimizer step reads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/data/data_config.h"
#include "twobp/nn/context.h"

namespace twobp {

// The value of `epoch` for samples that are read for evaluation.
inline constexpr int64_t kEvaluation = -1;
// Labels of this value are not counted, as in PyTorch's cross-entropy.
inline constexpr int64_t kIgnoredLabel = -100;

// Samples with an index. Any thread may read them.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;  // number of samples
  // Returns the fields of the samples at `indices`, stacked. For language models these are `input_ids` (B, S) int64 and
  // `labels` (B, S) int64. labels[b, t] is the token that follows position t, or -100 where nothing is counted. Random
  // choices (masked tokens, cropped images) depend on the dataset's seed, the index and the epoch alone. In evaluation
  // they are the same each time, and images are cropped at the centre.
  virtual Fields read(const std::vector<int64_t>& indices, int64_t epoch) const = 0;
  // The time that a model needs for the sample, in any unit, to compare it with other samples of the dataset. 0: all
  // cost the same.
  virtual int64_t cost(int64_t /*sample*/) const { return 0; }
};

// The two parts of the configured data. `held_out` is null if there is none.
struct DataSplit {
  std::shared_ptr<Dataset> train;
  std::shared_ptr<Dataset> held_out;
};
// Opens the configured data. Text with a tokenizer is encoded now unless it has been encoded before: see tokenize_text.
// Throws Error if nothing matches the glob, a file is unreadable, the text is too short for one sequence, arrays have
// the wrong shape or dtype, or a token id is outside [0, vocab) (file and position named). Also throws what
// tokenize_text throws.
DataSplit open_data(const DataConfig& data, const ModelInput& model, uint64_t seed);

// The micro-batches of one optimizer step. The last batch of an epoch may have fewer micro-batches, and the last of
// them fewer samples.
struct Batch {
  std::vector<Fields> micro_batches;
  int64_t targets = 0;  // counted labels (not -100) in all micro-batches; samples if there are no labels
  int64_t tokens = 0;   // input positions in all micro-batches; samples if there are no tokens
};

// The order of the samples in epoch `epoch`: 0..size-1, shuffled by (seed, epoch) if `shuffle`.
std::vector<int64_t> epoch_order(int64_t size, bool shuffle, uint64_t seed, int64_t epoch);

// Reads the samples at `indices`, in that order, in micro-batches of `micro_batch_size`. The last micro-batch has the
// remaining samples.
Batch read_batch(const Dataset& dataset, const std::vector<int64_t>& indices, int64_t epoch, int64_t micro_batch_size);

// Makes a batch of the fields and counts its targets and tokens. Without `count_targets`, the counted labels are the
// targets.
Batch make_batch(std::vector<Fields> micro_batches, const TargetCount& count_targets = {});

struct LoaderOptions {
  bool shuffle = false;
  uint64_t seed = 0;        // of the shuffled order
  int64_t read_ahead = 2;   // in batches
  int64_t first_batch = 0;  // counted from the beginning of the first epoch
  int workers = 1;          // threads
  bool evaluation = false;  // reads in order, as kEvaluation, and repeats without end
  // One of `replicas` loaders reads the share of `replica` of every batch. Of the batch's replicas x micro_batches
  // micro-batches, its share begins at replica x micro_batches. In the last batch of an epoch the share may be empty.
  // In a full batch, samples that cost unequally are in balanced_order (balance.h).
  int replicas = 1;
  int replica = 0;
  double timeout = 0;           // seconds that next() and wait() wait for a batch; 0: no limit
  TargetCount count_targets{};  // see make_batch
};

// Threads that read batches ahead of the training loop, one micro-batch at a time, over any number of epochs. The
// batches do not depend on the number of threads. The threads run at low priority.
class Loader {
 public:
  // A loader that starts at `first_batch` returns the same batches as one that starts at 0 returns from there on.
  Loader(std::shared_ptr<const Dataset> dataset, int64_t micro_batches, int64_t micro_batch_size,
         const LoaderOptions& options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // Waits for the next batch, or until `stop` returns true. Returns whether the batch is there.
  bool wait(const std::function<bool()>& stop = {});
  // Waits for the next batch and returns it. If reading it threw an exception, rethrows it, each time.
  Batch next();
  int64_t batches_per_epoch() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace twobp
