// Tests F that runs while another F or I waits for tokens of experts: when the two take turns, errors in either, and
// the thread of the second.
#include <map>
#include <tuple>

#include <ATen/Parallel.h>

#include "tests/pipeline/support.h"
#include "twobp/pipeline/executor/companion.h"
#include "twobp/pipeline/memory/block_cache.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::error_of;
using test::expect_contains;

// To the other one of two replicas that share experts, which sends what it gets. A message is there once another one
// has been sent, or when it is waited for: it has been looked for often.
class ToTwin : public Transport {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void isend(int, const Tag& tag, Values values) override { letters_[key(tag)] = {std::move(values), ++sent_, 0}; }
  bool try_receive(int from, const Tag& tag, Values& values) override {
    Letter& letter = letters_.at(key(tag));
    if (letter.number == sent_ && ++letter.looks < 10) return false;
    values = receive(from, tag, 0);
    return true;
  }
  Values receive(int, const Tag& tag, double) override { return std::move(letters_.extract(key(tag)).mapped().values); }
  void abort(const std::string&) override {}

 private:
  struct Letter {
    Values values;
    int number = 0;
    int looks = 0;
  };
  static std::tuple<int64_t, int, int> key(const Tag& tag) { return {tag.step, tag.stage, tag.micro_batch}; }

  std::map<std::tuple<int64_t, int, int>, Letter> letters_;
  int sent_ = 0;
};

using Call = std::function<void(char op, int layer, int64_t micro_batch)>;

// An exchange in the middle of F and I. `call` comes after it.
class Exchanges : public Layer {
 public:
  Exchanges(int layer, bool last, Call call) : layer_(layer), last_(last), call_(std::move(call)) {}

  Values forward(Values, Context& context, Saved& saved) override {
    exchange('F', context);
    saved.keep_until_p1(at::empty({100}, at::kByte));
    return {last_ ? at::zeros({}, at::kDouble) : at::zeros({1})};
  }
  Values backward_p1(Values, Context& context, Saved& saved) override {
    exchange('I', context);
    saved.take_p1(0);
    return {at::zeros({1})};
  }

 private:
  void exchange(char op, const Context& context) const {
    context.experts->send(std::vector<Values>(2));
    context.experts->receive();
    call_(op, layer_, context.micro_batch);
  }

  int layer_;
  bool last_;
  Call call_;
};

// Runs a step of a model of three layers.
StepReport run(const std::string& schedule, int micro_batches, const Call& call, int64_t cap = 0, bool events = false) {
  ModelSpec model;
  Profile profile;
  for (int i = 0; i < 3; ++i) {
    const std::string name = concat("layers.", i);
    model.layers.push_back({name, name, [=] { return std::make_unique<Exchanges>(i, i == 2, call); }});
    profile[name].forward_peak = profile[name].forward_held = 100;
    profile[name].p1_held = -100;
  }
  World world = std::move(make_thread_worlds(1, 1, {}).front());
  world.replicas = 2;
  world.data[0] = std::make_unique<ToTwin>();
  PipelineOptions options = test::options_of({3});
  options.experts = 2;
  Pipeline pipeline(model, profile, options, std::move(world));
  StepRequest request = test::step_request();
  request.want_events = events;
  request.update = test::update_by([](int) { return std::vector<Waited>(); });
  const StepPlan plan = pipeline.plan(schedule, micro_batches, P2Policy::kFill, {P2Batching::kLoop, MemoryCap(cap)});
  return pipeline.run(plan, std::vector<Fields>(static_cast<size_t>(micro_batches)), request);
}

std::string order_of(const std::string& schedule, int micro_batches, int64_t cap = 0) {
  std::string order;
  run(
      schedule, micro_batches, [&](char op, int layer, int64_t m) { order += concat(op, m, '.', layer, ' '); }, cap);
  return order;
}

TEST(Turns, TheSecondFollowsTheFirst) {
  EXPECT_EQ(order_of("gpipe", 2), "F0.0 F1.0 F0.1 F1.1 F0.2 F1.2 I0.2 I0.1 I0.0 I1.2 I1.1 I1.0 ");
  EXPECT_EQ(order_of("1f1b", 2), "F0.0 F0.1 F0.2 I0.2 F1.0 I0.1 F1.1 I0.0 F1.2 I1.2 I1.1 I1.0 ");
}

// Under a cap, F begins a layer if there is room for it beside what the first may need.
TEST(Turns, NeedRoom) {
  EXPECT_EQ(order_of("1f1b", 2, 350), "F0.0 F0.1 F0.2 I0.2 I0.1 F1.0 I0.0 F1.1 F1.2 I1.2 I1.1 I1.0 ");
  EXPECT_EQ(order_of("gpipe", 2, 350), "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 I0.2 I0.1 I0.0 I1.2 I1.1 I1.0 ");
}

TEST(Turns, EventsTellWhoRan) {
  std::string order;
  const StepReport report = run(
      "gpipe", 2, [](char, int, int64_t) {}, 0, /*events=*/true);
  double until = report.begin;
  for (const Event& event : report.events[0]) {
    EXPECT_GE(event.begin, until);
    until = event.end;
    if (event.kind == Event::Kind::kForward) order += concat(event.micro_batch, '.', event.part, ' ');
  }
  EXPECT_EQ(order, "0.0 1.0 0.1 1.1 0.2 1.2 0.3 1.3 ");
  EXPECT_EQ(report.stages[0].micro_batches, 2);
}

TEST(Turns, ErrorsNameTheirInstruction) {
  const auto fails = [](const std::string& schedule, char op, int64_t micro_batch) {
    return error_of([&] {
      run(schedule, 3,
          [=](char at, int layer, int64_t m) { TWOBP_CHECK(at != op || layer != 1 || m != micro_batch, "broken"); });
    });
  };
  expect_contains(fails("gpipe", 'F', 0), {"rank 0, step 5, 0F0: stage 0, layer layers.1: broken"});
  expect_contains(fails("gpipe", 'F', 1), {"rank 0, step 5, 0F1: stage 0, layer layers.1: broken"});
  expect_contains(fails("1f1b", 'I', 0), {"rank 0, step 5, 0I0: stage 0, layer layers.1: broken"});
  expect_contains(fails("1f1b", 'F', 2), {"rank 0, step 5, 0F2: stage 0, layer layers.1: broken"});
}

TEST(Companion, IsLikeTheThreadThatMadeIt) {
  BlockCache::install();
  const MemoryMeter meter({0});
  std::thread([&] {
    const MemoryMeter::Watch watch(meter);
    const BlockCache::Use blocks;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::set_num_threads(3);
    {
      Companion companion(meter);
      at::Tensor made;
      companion.begin([&] {
        EXPECT_TRUE(companion.is_here());
        EXPECT_EQ(at::get_num_threads(), 3);
        const MemoryMeter::Scope scope(0, MemoryCategory::kActivations);
        made = at::ones({1000});
        EXPECT_FALSE(made.set_requires_grad(true).mul(2).requires_grad()) << "below autograd";
        companion.yield(nullptr);
        const ProductTimer timer(10);
        companion.yield(nullptr);
      });
      EXPECT_FALSE(companion.is_here());
      EXPECT_TRUE(companion.busy());
      EXPECT_EQ(meter.held(0), 4000);
      made.reset();
      EXPECT_EQ(meter.held(0), 0);
      const int64_t allocations = BlockCache::allocations();
      made = at::ones({1000});
      EXPECT_EQ(BlockCache::allocations(), allocations) << "one cache";
      const double operations = product_time().operations;
      companion.go_on();
      EXPECT_EQ(product_time().operations, operations + 10);
      companion.end();
      EXPECT_FALSE(companion.busy());
      EXPECT_THROW(companion.begin([] { fail("no"); }), Aborted);
      EXPECT_FALSE(companion.busy());
      EXPECT_THROW(std::rethrow_exception(companion.failure()), Error);
      companion.begin([] {});
      EXPECT_EQ(companion.failure(), nullptr);
    }
  }).join();
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
