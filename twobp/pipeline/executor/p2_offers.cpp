#include "twobp/pipeline/executor/p2_offers.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/core/patience.h"
#include "twobp/core/text.h"
#include "twobp/transport/transport.h"

namespace twobp {
namespace {

// The approximate work of backward-p2 of the leaf. For a given micro-batch, it is proportional to the number
// of weights.
int64_t work_of(Layer& leaf) {
  std::vector<Parameter*> parameters;
  leaf.collect_parameters(parameters);
  int64_t numel = 1;
  for (const Parameter* parameter : parameters) numel += parameter->value.numel();
  return numel;
}

}  // namespace

void P2Offers::begin_step() {
  const std::lock_guard lock(mutex_);
  for (Offer& offer : offers_) offer = {};
}

void P2Offers::abort(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    reason_ = reason;
  }
  changed_.notify_all();
}

P2Offers::Outcome P2Offers::run_own(int rank, const std::vector<OfferedP2>& units, int64_t largest,
                                    const Run& run, double timeout) {
  Outcome outcome;
  std::unique_lock lock(mutex_);
  Offer& offer = offers_[rank];
  offer.made = true;
  offer.left = units.size();
  offer.largest = largest;
  for (const OfferedP2& p2 : units) {
    const auto same = [&](const Leaf& leaf) { return leaf.units.front().unit.layer == p2.unit.layer; };
    auto leaf = std::find_if(offer.leaves.begin(), offer.leaves.end(), same);
    if (leaf == offer.leaves.end()) leaf = offer.leaves.insert(leaf, {work_of(*p2.unit.layer), {}, false});
    leaf->units.push_back(p2);
    offer.helped.resize(std::max(offer.helped.size(), static_cast<size_t>(p2.local_stage) + 1));
  }
  ++changes_;
  changed_.notify_all();
  while (offer.left > 0 && !offer.error) {
    if (Leaf* leaf = next(offer, true)) {
      run_next(lock, offer, *leaf, run);
    } else {
      outcome.waited += wait(lock, rank, timeout);
    }
  }
  if (offer.error) std::rethrow_exception(offer.error);
  outcome.helped = offer.helped;
  return outcome;
}

double P2Offers::help(int rank, const HasRoom& has_room, const Run& run, double timeout) {
  double waited = 0;
  std::unique_lock lock(mutex_);
  while (more_may_come()) {
    Offer* helped = nullptr;
    Leaf* leaf = nullptr;
    for (size_t owner = 0; owner < offers_.size() && leaf == nullptr; ++owner) {
      helped = &offers_[owner];
      leaf = next(*helped, false);
      // One for the owner, who runs units too.
      const int64_t at_once = std::max<int64_t>(helped->running + 1, 2);
      if (leaf != nullptr && !has_room(static_cast<int>(owner), at_once * helped->largest)) leaf = nullptr;
    }
    if (leaf == nullptr) {
      waited += wait(lock, rank, timeout);
      continue;
    }
    Spent& sum = helped->helped[leaf->units.front().local_stage];
    const std::optional<Spent> spent = run_next(lock, *helped, *leaf, run);
    if (!spent) continue;  // the owner reports the error
    sum.seconds += spent->seconds;
    sum.products += spent->products;
  }
  return waited;
}

P2Offers::Leaf* P2Offers::next(Offer& offer, bool first) {
  if (offer.error) return nullptr;
  Leaf* most = nullptr;
  for (Leaf& leaf : offer.leaves) {
    if (leaf.busy || leaf.units.empty()) continue;
    const bool more = most == nullptr || leaf.left() > most->left();
    if (more || (!first && leaf.left() == most->left())) most = &leaf;
  }
  return most;
}

bool P2Offers::more_may_come() const {
  return std::any_of(offers_.begin(), offers_.end(), [](const Offer& offer) {
    const auto unclaimed = [](const Leaf& leaf) { return leaf.units.size() > (leaf.busy ? 1 : 0); };
    return !offer.made || (!offer.error && std::any_of(offer.leaves.begin(), offer.leaves.end(), unclaimed));
  });
}

std::optional<P2Offers::Spent> P2Offers::run_next(std::unique_lock<std::mutex>& lock, Offer& offer,
                                                  Leaf& leaf, const Run& run) {
  throw_if_aborted();
  const OfferedP2 p2 = leaf.units.front();
  leaf.busy = true;
  ++offer.running;
  std::optional<Spent> spent;
  std::exception_ptr error;
  lock.unlock();
  try {
    spent = run(p2);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  leaf.units.pop_front();
  leaf.busy = false;
  --offer.running;
  --offer.left;
  if (error && !offer.error) offer.error = error;
  ++changes_;
  changed_.notify_all();
  return spent;
}

double P2Offers::wait(std::unique_lock<std::mutex>& lock, int rank, double timeout) {
  const double begin = now_seconds();
  const bool changed =
      wait_patiently(changed_, lock, timeout, [&, seen = changes_] { return aborted_ || changes_ != seen; });
  throw_if_aborted();
  TWOBP_CHECK(changed, "rank ", rank, " waited ", timeout,
              " s for the weight gradients at the end of the step: a rank is stuck, or a step takes "
              "longer than pipeline.timeout");
  return now_seconds() - begin;
}

void P2Offers::throw_if_aborted() const {
  if (aborted_) throw Aborted(concat("stopped: ", reason_));
}

}  // namespace twobp
