// Where training data comes from: a Dataset is a list of sequences, a Batch is what one optimizer step reads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/data/data_config.h"
#include "twobp/nn/context.h"

namespace twobp {

// The `epoch` of samples that are read to evaluate on them.
inline constexpr int64_t kEvaluation = -1;
// A label that is not counted, as PyTorch's cross-entropy has it.
inline constexpr int64_t kIgnoredLabel = -100;

// Indexed samples, read from any thread.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;  // samples
  // The fields of the samples at `indices`, stacked: for language models `input_ids` (B, S) int64 and
  // `labels` (B, S) int64, where labels[b, t] is the token that follows position t, -100 where nothing is
  // counted. What is drawn at random (masked tokens, cropped images) depends on the dataset's seed, the index
  // and the epoch alone; in an evaluation it is the same each time, and images are cut out at the centre.
  virtual Fields read(const std::vector<int64_t>& indices, int64_t epoch) const = 0;
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
DataSplit open_data(const DataConfig& data, const ModelInput& model, uint64_t seed);

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
Batch read_batch(const Dataset& dataset, const std::vector<int64_t>& indices, int64_t epoch,
                 int64_t micro_batch_size);

// What was read, with its targets and tokens counted.
Batch make_batch(std::vector<Fields> micro_batches);

struct LoaderOptions {
  bool shuffle = false;
  uint64_t seed = 0;        // of the order
  int64_t read_ahead = 2;   // batches
  int64_t first_batch = 0;  // counted from the beginning of the first epoch
  int workers = 1;          // threads
  bool evaluation = false;  // reads in order, as kEvaluation, over and over
  // Of `replicas` loaders, this one reads the share of `replica` of every batch: of replicas x micro_batches
  // micro-batches those from replica x micro_batches on. The last batch of an epoch may leave it none.
  int replicas = 1;
  int replica = 0;
  double timeout = 0;  // seconds that next() waits for a batch; 0: without an end
};

// Threads that read batches ahead of the training loop, each a micro-batch at a time, over as many epochs as
// are asked for. What comes out does not depend on how many there are. They run at a low priority.
class Loader {
 public:
  // A loader that starts at `first_batch` gives the very batches that one from 0 gives from there on.
  Loader(std::shared_ptr<const Dataset> dataset, int64_t micro_batches, int64_t micro_batch_size,
         const LoaderOptions& options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next batch. Rethrows what was thrown while it was read, each time.
  Batch next();
  int64_t batches_per_epoch() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace twobp
