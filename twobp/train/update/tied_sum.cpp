#include "twobp/train/update/tied_sum.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/transport/message.h"

namespace twobp {

TiedSum::TiedSum(const UsedWeight& weight, const Options& options)
    : weight_(weight),
      options_(options),
      rank_(options.ranks.rank()),
      adds_(weight.uses.front().rank),
      own_(weight.on(rank_)),
      others_(weight.ranks_of_tied(rank_)) {
  others_.erase(rank_);
  for (size_t use = 0; use < weight.uses.size(); ++use) {
    Parameter* const parameter = weight.uses[use].parameter;
    if (weight.uses[use].rank != rank_) continue;
    if (!weight.uses.front().parameter || !weight.uses.front().parameter->shares_grad()) parameter->grad_to_add();
    if (own_ != nullptr) continue;
    // This rank waits until the weight that it shares is updated.
    options_.ranks.isend(adds_, tag(use), {parameter->grad_to_add()});
    parameter->forget_grad();
  }
  if (own_ == nullptr) return;
  numbers_ = own_->numel();
  if (!weight.shared) {
    const int64_t most = options.piece_bytes / static_cast<int64_t>(own_->grad.element_size());
    numbers_ = std::clamp<int64_t>(most, 1, std::max<int64_t>(1, numbers_));
    pieces_ = std::max<int64_t>(1, (own_->numel() + numbers_ - 1) / numbers_);
  }
  if (rank_ != adds_) send_uses();
}

WaitCause TiedSum::cause() const {
  return others_.empty() ? WaitCause::kGradients : WaitCause::kMessage;
}

at::Tensor TiedSum::piece_of(const at::Tensor& gradient, int64_t piece) const {
  const int64_t begin = piece * numbers_;
  return numbers_between(gradient, begin, std::min(begin + numbers_, gradient.numel()));
}

// Messages of one tag keep their order. The sum's number follows those of the uses.
Tag TiedSum::tag(size_t use) const {
  return {options_.step, options_.weight, static_cast<int>(use), MessageKind::kTiedGradient};
}

bool TiedSum::take(size_t use, Values& values) {
  awaited_ = use;
  const bool is_sum = use == weight_.uses.size();
  return options_.ranks.try_receive(is_sum ? adds_ : weight_.uses[use].rank, tag(use), values);
}

bool TiedSum::ready() {
  if (own_ == nullptr || done_ == pieces_) return true;
  if (rank_ == adds_ ? !sum_pieces() : !take_sums()) return false;
  for (const WeightUse& use : weight_.uses) {
    if (use.rank == rank_ && use.parameter != own_) use.parameter->forget_grad();
  }
  own_->mark_grad_written();
  return true;
}

// Of two uses in one memory, the second has written to the gradient already.
bool TiedSum::join() {
  if (!own_->shares_grad()) return true;
  const WeightUse& other = weight_.uses[1];
  Values written;
  if (other.rank == rank_) {
    other.parameter->grad_to_add();
    other.parameter->forget_grad();
  } else if (!take(1, written)) {
    return false;
  }
  const MemoryMeter::Scope scope(weight_.uses.front().stage, MemoryCategory::kGradients);
  own_->join_grad();
  use_ = weight_.uses.size();
  return true;
}

bool TiedSum::add_uses() {
  at::Tensor sum = piece_of(own_->grad, added_);
  for (; use_ < weight_.uses.size(); ++use_) {
    const WeightUse& use = weight_.uses[use_];
    Values part;
    if (use.rank == rank_) {
      part = {piece_of(use.parameter->grad, added_)};
    } else if (!take(use_, part)) {
      return false;
    }
    TWOBP_CHECK(part.at(0).numel() == sum.numel(), "rank ", use.rank, " sent ", part[0].numel(),
                " numbers of the gradient of ", own_->name(), ", but rank ", rank_, " adds ", sum.numel(),
                ": have both the same pipeline.bucket?");
    sum.add_(numbers_between(part[0], 0, part[0].numel()));
  }
  if (!own_->shares_grad()) use_ = 1;
  return true;
}

bool TiedSum::sum_pieces() {
  if (!joined_ && !(joined_ = join())) return false;
  while (true) {
    while (added_ < std::min(pieces_, done_ + kAhead) && add_uses()) {
      if (options_.replicas != nullptr) {
        over_replicas_.emplace_back(*options_.replicas, piece_of(own_->grad, added_),
                                    options_.first_sum + static_cast<int>(added_));
      }
      ++added_;
    }
    if (done_ == added_ || (!over_replicas_.empty() && !over_replicas_.front().ready())) return false;
    if (!over_replicas_.empty()) over_replicas_.pop_front();
    if (!weight_.shared && !others_.empty()) {
      // This rank may overwrite its gradient at once.
      const at::Tensor sum = piece_of(own_->grad, done_).clone();
      for (const int to : others_) options_.ranks.isend(to, tag(weight_.uses.size()), {sum});
    }
    if (++done_ == pieces_) return true;
  }
}

// They are overwritten only by the sum, which comes when the rank that adds them has read them.
void TiedSum::send_uses() {
  for (; added_ < std::min(pieces_, done_ + kAhead); ++added_) {
    for (size_t use = 0; use < weight_.uses.size(); ++use) {
      if (weight_.uses[use].rank != rank_) continue;
      options_.ranks.isend(adds_, tag(use), {piece_of(weight_.uses[use].parameter->grad, added_)});
    }
  }
}

bool TiedSum::take_sums() {
  for (; done_ < pieces_; ++done_) {
    send_uses();
    Values sum;
    if (!take(weight_.uses.size(), sum)) return false;
    piece_of(own_->grad, done_).copy_(sum.at(0));
  }
  return true;
}

void TiedSum::fail(double timeout) const {
  if (!over_replicas_.empty()) over_replicas_.front().fail(timeout);
  const bool is_sum = awaited_ == weight_.uses.size();
  MessageWait(options_.ranks, is_sum ? adds_ : weight_.uses[awaited_].rank, tag(awaited_)).fail(timeout);
}

}  // namespace twobp
