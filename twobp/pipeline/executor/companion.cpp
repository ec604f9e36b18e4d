#include "twobp/pipeline/executor/companion.h"

#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>

#include "twobp/pipeline/memory/block_cache.h"
#include "twobp/transport/transport.h"

namespace twobp {

Companion::Companion(const MemoryMeter& meter)
    : meter_(meter), thread_([this, blocks = BlockCache::here(), threads = at::get_num_threads()] {
        BlockCache::share(blocks);
        at::get_num_threads();  // as in RankThreads
        at::internal::lazy_init_num_threads();
        at::set_num_threads(threads);
        run();
      }) {}

Companion::~Companion() {
  pass_turn(/*to_companion=*/true);
  thread_.join();
}

void Companion::begin(std::function<void()> work) {
  work_ = std::move(work);
  state_ = std::make_unique<const at::ThreadLocalState>();
  failure_ = nullptr;
  busy_ = true;
  go_on();
}

void Companion::go_on() {
  const ProductTime before = products_;
  pass_turn(/*to_companion=*/true);
  wait_for_turn(/*of_companion=*/false);
  add_product_time(products_ - before);
  if (failure_ && !ends_) throw Aborted("the F beside it failed");
}

void Companion::end() {
  if (!busy_) return;
  ends_ = true;
  go_on();
  ends_ = false;
}

void Companion::yield(Wait* awaits) {
  awaits_ = awaits;
  pass_turn(/*to_companion=*/false);
  wait_for_turn(/*of_companion=*/true);
  if (ends_) throw Aborted("the step has failed");
}

void Companion::run() {
  for (wait_for_turn(/*of_companion=*/true); work_; wait_for_turn(/*of_companion=*/true)) {
    do_work();
    work_ = nullptr;
    state_.reset();
    busy_ = false;
    pass_turn(/*to_companion=*/false);
  }
}

void Companion::do_work() {
  const at::ThreadLocalStateGuard as_the_rank(*state_);
  const MemoryMeter::Watch watch(meter_);
  try {
    work_();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void Companion::pass_turn(bool to_companion) {
  if (!to_companion) products_ = product_time();
  {
    const std::lock_guard lock(mutex_);
    companions_turn_ = to_companion;
  }
  passed_.notify_one();
}

void Companion::wait_for_turn(bool of_companion) {
  std::unique_lock lock(mutex_);
  passed_.wait(lock, [&] { return companions_turn_ == of_companion; });
}

}  // namespace twobp
