// The sum of a tied weight's gradients: over its uses, in model order, and over replicas. It goes piece by piece. The
// rank of the first use adds up a piece, sums it over the replicas and sends it to the other ranks, which send their
// gradients at most kAhead pieces ahead of the sum. So messages hold few pieces at once, and while one is on its way to
// a rank, another is on its way back, and the next is summed over the replicas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>

#include "twobp/core/wait.h"
#include "twobp/train/update/rank_update.h"
#include "twobp/transport/collectives.h"

namespace twobp {

class TiedSum : public Wait {
 public:
  struct Options {
    Transport& ranks;               // of the pipeline
    Transport* replicas = nullptr;  // of this rank; null: there is one
    int64_t step = 0;
    int weight = 0;           // the same number on all ranks
    int64_t piece_bytes = 0;  // of the gradient
    int first_sum = 0;        // the number of the sum of the first piece over the replicas; the next ones follow
  };
  static constexpr int64_t kAhead = 2;

  // `weight` outlives this. Its uses on this rank have their gradients. Begins to send them.
  TiedSum(const UsedWeight& weight, const Options& options);

  int64_t pieces() const { return pieces_; }
  WaitCause cause() const override;
  // Moves what can be moved. Returns true when the sum is the gradient of the rank's first use, or, of weights that
  // threads share, of the first use of all. The others have none. All replicas must call this for their weights in one
  // order, and begin no other sums from the first call on.
  bool ready() override;
  size_t progress() const override { return static_cast<size_t>(added_ + done_); }
  [[noreturn]] void fail(double timeout) const override;

 private:
  at::Tensor piece_of(const at::Tensor& gradient, int64_t piece) const;
  Tag tag(size_t use) const;
  bool take(size_t use, Values& values);
  // On the rank of the first use.
  bool join();
  bool add_uses();
  bool sum_pieces();
  // On the others.
  void send_uses();
  bool take_sums();

  const UsedWeight& weight_;
  Options options_;
  int rank_;
  int adds_;              // the rank of the first use
  Parameter* own_;        // the rank's first use; null: another rank updates the weight
  std::set<int> others_;  // ranks
  int64_t numbers_ = 0;   // of a piece
  int64_t pieces_ = 1;
  bool joined_ = false;
  size_t use_ = 1;  // the next to be added to the piece
  size_t awaited_ = 1;
  int64_t added_ = 0;  // pieces; on other ranks: sent
  int64_t done_ = 0;
  std::deque<AllReduce> over_replicas_;  // of pieces that are added
};

}  // namespace twobp
