// Runs random schedules, costs, caps and policies through the executor and through the simulation, and compares the
// order of the work unit by unit. Time is not real here: each rank has a clock that its layers move on, and a message
// arrives when the receiver's clock has reached its time.
#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <tuple>

#include "tests/pipeline/support.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/schedule/simulate/simulator.h"
#include "twobp/schedule/w_queue.h"

namespace twobp::TWOBP_FILE {
namespace {

// W of one micro-batch that ran back to back, or an F or I without a break.
struct Work {
  Op op = Op::kForward;
  int stage = 0;
  int micro_batch = 0;
  double begin = 0;
  double end = 0;
  int units = 0;  // of W
};

std::ostream& operator<<(std::ostream& out, const Work& work) {
  return out << to_string(Instruction{work.op, work.stage, work.micro_batch}) << " [" << work.begin << ", " << work.end
             << "] " << work.units;
}

bool alike(const Work& a, const Work& b) {
  return a.op == b.op && a.stage == b.stage && a.micro_batch == b.micro_batch && a.units == b.units &&
         std::abs(a.begin - b.begin) < 1e-6 && std::abs(a.end - b.end) < 1e-6;
}

// A rank's clock, and what the rank did.
struct Clock {
  double now = 0;
  std::vector<Work> done;

  void run(Op op, int stage, int micro_batch, double seconds) {
    const Work work{op, stage, micro_batch, now, now + seconds, op == Op::kBackwardP2 ? 1 : 0};
    now = work.end;
    if (!done.empty() && done.back().op == op && done.back().stage == stage && done.back().micro_batch == micro_batch &&
        done.back().end == work.begin) {
      done.back().end = work.end;
      done.back().units += work.units;
    } else {
      done.push_back(work);
    }
  }
};

struct Costs {
  LayerCost cost;
  int64_t input = 0;  // bytes
  int64_t input_gradient = 0;
  int64_t output = 0;
  int64_t activation = 0;
  int64_t stash = 0;
  int stage = 0;
  bool exchanges = false;  // tokens of experts, with another replica
  Clock* clock = nullptr;
};

at::Tensor bytes(int64_t count) {
  return at::empty({count}, at::kByte);
}

class Timed : public Layer {
 public:
  Timed(const Costs& costs, bool last) : costs_(costs), last_(last) {}

  Values forward(Values x, Context& context, Saved& saved) override {
    exchange(context);
    costs_.clock->run(Op::kForward, costs_.stage, static_cast<int>(context.micro_batch), costs_.cost.forward);
    at::Tensor activation = bytes(costs_.activation);
    if (context.keeps()) saved.keep_until_p1(activation);
    activation.reset();
    Values y{last_ ? at::zeros({}, at::kDouble) : bytes(costs_.output)};
    x.clear();
    exchange(context);
    return y;
  }
  Values backward_p1(Values dy, Context& context, Saved& saved) override {
    exchange(context);
    costs_.clock->run(Op::kBackwardP1, costs_.stage, static_cast<int>(context.micro_batch), costs_.cost.backward_p1);
    Values dx;
    if (costs_.input_gradient > 0) dx.push_back(bytes(costs_.input_gradient));
    if (costs_.cost.p2_units > 0) {
      at::Tensor stash = bytes(costs_.stash);
      micro_batch_of_[stash.data_ptr()] = static_cast<int>(context.micro_batch);
      saved.keep_until_p2(std::move(stash));
    }
    saved.take_p1(0);
    dy.clear();
    exchange(context);
    return dx;
  }
  void backward_p2(std::span<Saved* const> saved) override {
    for (const Saved* one : saved)
      costs_.clock->run(Op::kBackwardP2, costs_.stage, micro_batch_of_.at(one->p2(0).data_ptr()),
                        costs_.cost.backward_p2);
  }
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override {
    if (costs_.cost.p2_units > 0) units.push_back({this, &saved});
  }

 private:
  void exchange(const Context& context) const {
    if (!costs_.exchanges) return;
    context.experts->send(std::vector<Values>(2));
    context.experts->receive();
  }

  Costs costs_;
  bool last_;
  std::map<const void*, int> micro_batch_of_;
};

// Messages take `latency` seconds of their receiver's clock. Their memory is nobody's in between.
struct Mail {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::tuple<int64_t, int, int, int>, std::pair<double, std::vector<int64_t>>> letters;  // arrival and sizes
  bool aborted = false;
};

class TimedTransport : public Transport {
 public:
  TimedTransport(int rank, std::vector<Clock>& clocks, Mail& mail, double latency)
      : rank_(rank), clocks_(clocks), mail_(mail), latency_(latency) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(clocks_.size()); }
  void isend(int, const Tag& tag, Values values) override {
    std::vector<int64_t> sizes;
    for (const at::Tensor& tensor : values) sizes.push_back(tensor.numel());
    const std::lock_guard lock(mail_.mutex);
    mail_.letters[key(tag)] = {clocks_[rank_].now + latency_, sizes};
    mail_.changed.notify_all();
  }
  bool try_receive(int, const Tag& tag, Values& values) override {
    const auto [arrival, sizes] = letter(tag);
    if (exceeds(arrival, clocks_[rank_].now)) return false;
    take(sizes, values);
    return true;
  }
  Values receive(int, const Tag& tag, double) override {
    const auto [arrival, sizes] = letter(tag);
    clocks_[rank_].now = std::max(clocks_[rank_].now, arrival);
    Values values;
    take(sizes, values);
    return values;
  }
  void abort(const std::string&) override {
    const std::lock_guard lock(mail_.mutex);
    mail_.aborted = true;
    mail_.changed.notify_all();
  }

 protected:
  double& now() { return clocks_[rank_].now; }
  double arrival(const Tag& tag) { return letter(tag).first; }

 private:
  static std::tuple<int64_t, int, int, int> key(const Tag& tag) {
    return {tag.step, tag.stage, tag.micro_batch, static_cast<int>(tag.kind)};
  }
  std::pair<double, std::vector<int64_t>> letter(const Tag& tag) {
    std::unique_lock lock(mail_.mutex);
    mail_.changed.wait(lock, [&] { return mail_.aborted || mail_.letters.contains(key(tag)); });
    if (mail_.aborted) throw Aborted("another rank failed");
    return mail_.letters.at(key(tag));
  }
  static void take(const std::vector<int64_t>& sizes, Values& values) {
    const MemoryMeter::Scope unseen(-1, MemoryCategory::kActivations);  // the executor books it
    for (const int64_t size : sizes) values.push_back(bytes(size));
  }

  int rank_;
  std::vector<Clock>& clocks_;
  Mail& mail_;
  double latency_;
};

// To the other one of two replicas that share experts, which does the same at the same time. A rank that looks for
// messages again and again has nothing else to do: its clock goes on to the first of them.
class ToTwin : public TimedTransport {
 public:
  using TimedTransport::TimedTransport;
  bool try_receive(int from, const Tag& tag, Values& values) override {
    if (TimedTransport::try_receive(from, tag, values)) return true;
    if (std::exchange(looked_at_, now()) != now()) {
      looks_ = 0;
      first_ = arrival(tag);
      lead_ = tag;
    }
    first_ = std::min(first_, arrival(tag));
    if (++looks_ > 10 && tag == lead_) now() = first_;
    return false;
  }
  int rank() const override { return 0; }
  int size() const override { return 2; }

 private:
  double looked_at_ = -1;
  Tag lead_;          // of the F or I that leads, which looks first
  int looks_ = 0;     // at that time
  double first_ = 0;  // arrival of what it looked for
};

struct Case {
  std::string schedule;
  P2Policy policy = P2Policy::kFill;
  P2Order order = P2Order::kOldest;
  int ranks = 1;
  int micro_batches = 1;
  int frozen = 0;  // stages
  int ahead = 0;   // see SimulationOptions
  std::vector<int> split;
  std::vector<int> rank_of_stage;
  std::vector<Costs> layers;
  double latency = 0;
  double exchange = 0;        // seconds of each; 0: there is none
  std::vector<bool> streams;  // by stage; empty: none
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.schedule << ' ' << policy_name(c.policy) << (c.order == P2Order::kBucket ? " bucket" : "") << ", "
             << c.ranks << " ranks, " << c.micro_batches << " micro-batches, " << c.layers.size() << " layers, latency "
             << c.latency << ", exchanges of " << c.exchange << ", " << c.frozen << " frozen stages, " << c.ahead
             << " F ahead, " << std::count(c.streams.begin(), c.streams.end(), true) << " stages stream";
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int number(int low, int high) { return std::uniform_int_distribution(low, high)(random_); }
  bool chance(int percent) { return number(1, 100) <= percent; }
  template <typename T>
  const T& of(const std::vector<T>& all) {
    return all[number(0, static_cast<int>(all.size()) - 1)];
  }

 private:
  std::mt19937_64 random_;
};

Case draw_case(Draw& draw) {
  while (true) {
    Case c;
    c.schedule = draw.of(schedule_names());
    c.policy = draw.of(policies_of(c.schedule));
    c.order = draw.chance(40) ? P2Order::kBucket : P2Order::kOldest;
    c.ranks = draw.number(1, 4);
    c.micro_batches = draw.number(1, 9);
    const Placement placement = named_schedule(c.schedule).placement;
    int stages = c.ranks * usual_stages_per_rank(placement);
    if (!admits(c.schedule, stages, c.ranks, c.micro_batches)) continue;
    c.rank_of_stage = place_stages(placement, stages, c.ranks);
    if (draw.chance(40)) c.frozen = c.ranks;
    if (c.frozen > 1 && draw.chance(70)) c.ahead = draw.number(1, std::min(c.frozen, c.micro_batches));
    for (int rank = c.frozen; rank-- > 0;) c.rank_of_stage.insert(c.rank_of_stage.begin(), rank);
    stages += c.frozen;
    int64_t input = 0;
    const double unit = 1.0 / 64;
    for (int stage = 0; stage < stages; ++stage) {
      c.split.push_back(draw.number(1, 4));
      for (int i = 0; i < c.split.back(); ++i) {
        Costs& layer = c.layers.emplace_back();
        layer.stage = stage;
        layer.input = input;
        layer.input_gradient = stage < c.frozen || (stage == c.frozen && i == 0) ? 0 : input;
        layer.output = input = draw.number(1, 64);
        layer.activation = draw.number(1, 200);
        layer.cost.forward = unit * draw.number(1, 100);
        if (stage < c.frozen) continue;
        layer.cost.backward_p1 = unit * draw.number(1, 100);
        if (draw.chance(70)) {
          layer.cost.p2_units = 1;
          layer.cost.backward_p2 = unit * draw.number(1, 100);
          layer.stash = draw.number(1, 200);
        }
      }
    }
    const bool refused = c.schedule == "dualpipe-v" && c.policy == P2Policy::kPlaced;  // B before W of others
    if (draw.chance(40) && !refused) {
      for (int stage = 0; stage < stages; ++stage) c.streams.push_back(draw.chance(70));
    }
    c.layers.back().output = sizeof(double);
    c.latency = draw.chance(50) ? 0 : unit * draw.number(1, 60);
    if (c.ahead == 0 && draw.chance(50)) {
      c.exchange = unit * draw.number(1, 60);
      for (Costs& layer : c.layers) layer.exchanges = draw.chance(50);
    }
    return c;
  }
}

void fill_in_bytes(std::vector<Costs>& layers) {
  for (size_t i = 0; i < layers.size(); ++i) {
    Costs& one = layers[i];
    LayerCost& cost = one.cost;
    const bool last = i + 1 == layers.size();
    const auto input = static_cast<double>(one.input);
    const auto input_gradient = static_cast<double>(one.input_gradient);
    const auto output = static_cast<double>(one.output);
    const auto activation = static_cast<double>(one.activation);
    const auto stash = static_cast<double>(one.stash);
    cost.forward_peak = activation + output;
    cost.forward_held = activation + output - input;
    cost.p1_peak = input_gradient + stash;
    cost.p1_held = input_gradient + stash - activation - (last ? 0 : output);
    cost.stash = stash;
    cost.output = output;
    cost.input_gradient = input_gradient;
    if (!one.exchanges) continue;
    cost.forward_to_experts = cost.forward_from_experts = 1;
    cost.p1_to_experts = cost.p1_from_experts = 1;
  }
}

// The simulation runs all I of a B before its W. Both become one op.
std::vector<Work> with_whole_b(const std::vector<Work>& list, const std::set<std::pair<int, int>>& fused) {
  std::vector<Work> whole;
  for (Work work : list) {
    if (fused.contains({work.stage, work.micro_batch}) && work.op == Op::kBackwardP2) work.op = Op::kBackwardP1;
    if (!whole.empty() && whole.back().op == work.op && whole.back().stage == work.stage &&
        whole.back().micro_batch == work.micro_batch && whole.back().end == work.begin) {
      whole.back().end = work.end;
      whole.back().units += work.units;
    } else {
      whole.push_back(work);
    }
  }
  return whole;
}

std::set<std::pair<int, int>> fused_of(const Schedule& schedule) {
  std::set<std::pair<int, int>> fused;
  for (const auto& list : schedule.ranks) {
    for (const Instruction& instruction : list) {
      for (int i = 0; i < instruction.count && instruction.op == Op::kBackward; ++i)
        fused.emplace(instruction.stage, instruction.micro_batch + i);
    }
  }
  return fused;
}

std::string text_of(const std::vector<Work>& list, size_t end) {
  std::ostringstream out;
  for (size_t i = end > 6 ? end - 6 : 0; i < std::min(end + 2, list.size()); ++i) out << "  " << list[i] << '\n';
  return out.str();
}

struct Run {
  int64_t cap = 0;
  double executed_peak = 0;  // of rank 0
  double simulated_peak = 0;
  std::vector<std::vector<Work>> executed;  // by rank
  std::vector<std::vector<Work>> simulated;
};

std::vector<std::vector<Work>> work_of(const Simulation& simulation) {
  std::vector<std::vector<Work>> work;
  for (const RankSimulation& rank : simulation.ranks) {
    auto& list = work.emplace_back();
    for (const SimulatedOp& op : rank.timeline)
      list.push_back({op.op, op.stage, op.micro_batch, op.begin, op.end, op.pieces});
  }
  return work;
}

// None: the two do not agree on whether waits run W, because a cap is meant for another transport.
std::optional<Run> run(Draw& draw, const Case& c) {
  std::vector<Clock> clocks(c.ranks);
  Mail mail;
  std::vector<Costs> layers = c.layers;
  fill_in_bytes(layers);
  ModelSpec model;
  Profile profile;
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].clock = &clocks[c.rank_of_stage[layers[i].stage]];
    const std::string name = concat("layers.", i);
    profile[name] = layers[i].cost;
    model.layers.push_back({name, name, [costs = layers[i], last = i + 1 == layers.size()] {
                              return std::make_unique<Timed>(costs, last);
                            }});
  }
  World world = std::move(make_thread_worlds(1, c.ranks, {}).front());
  world.all_local = false;  // so that ranks book their messages
  for (int rank = 0; rank < c.ranks; ++rank)
    world.pipeline[rank] = std::make_unique<TimedTransport>(rank, clocks, mail, c.latency);
  PipelineOptions pipeline_options = test::options_of(c.split, c.rank_of_stage);
  std::vector<Mail> twins(c.ranks);
  if (c.exchange > 0) {
    pipeline_options.experts = world.replicas = 2;
    for (int rank = 0; rank < c.ranks; ++rank)
      world.data[rank] = std::make_unique<ToTwin>(rank, clocks, twins[rank], c.exchange);
  }
  pipeline_options.frozen_stages = c.frozen > 0;
  model.first_trainable = std::accumulate(c.split.begin(), c.split.begin() + c.frozen, 0);
  Pipeline pipeline(model, profile, pipeline_options, std::move(world));

  SimulationOptions options;
  options.message_seconds = c.latency;
  options.data_parallel.exchange_latency = c.exchange;
  options.p2_order = c.order;
  options.streams = c.streams;
  options.ahead = c.ahead;
  pipeline.stream_gradients(c.streams);
  StepOptions running{P2Batching::kLoop, MemoryCap::none(), c.order};
  StepPlan plan = pipeline.plan(c.schedule, c.micro_batches, c.policy, running);
  const std::vector<StageCost> costs = profiled_costs(pipeline.layer_costs());
  if (draw.chance(60)) {
    const Simulation free = simulate(plan.schedule, costs, options);
    double most = 0;
    for (const RankSimulation& rank : free.ranks) most = std::max(most, rank.peak_bytes);
    running.memory_cap = MemoryCap(std::max<int64_t>(1, static_cast<int64_t>(most * draw.number(20, 110) / 100)));
    options.cap_per_rank.assign(c.ranks, static_cast<double>(running.memory_cap.bytes()));
    SimulationOptions own = options;
    own.message_holder = MessageHolder::kSender;
    own.message_seconds = 0;
    own.data_parallel = {};
    own.p2_order = P2Order::kOldest;
    if (fills_waits(plan.schedule, costs, options) != fills_waits(plan.schedule, costs, own)) return std::nullopt;
  }
  plan = pipeline.plan(c.schedule, c.micro_batches, c.policy, running);
  StepRequest request = test::step_request();
  request.update = test::update_by([](int) { return std::vector<Waited>(); });
  const std::vector<Fields> batch(c.micro_batches);
  if (plan.ahead = c.ahead; c.ahead > 0) {  // a step in between
    request.next = batch;
    pipeline.run(plan, batch, request);
    for (Clock& clock : clocks) clock = {};
    ++request.step;
  }
  const MemoryUse use = pipeline.run(plan, batch, request).rank_memory[0];
  Run result;
  result.cap = running.memory_cap.bytes();
  const Simulation simulation = simulate(plan.schedule, costs, options);
  result.executed_peak = static_cast<double>(use.peak - use.total());
  result.simulated_peak = simulation.ranks[0].peak_bytes;
  const std::set<std::pair<int, int>> fused = fused_of(plan.schedule);
  for (const auto& list : work_of(simulation)) result.simulated.push_back(with_whole_b(list, fused));
  for (const Clock& clock : clocks) result.executed.push_back(with_whole_b(clock.done, fused));
  return result;
}

// Whether an F ran between parts of another F or I.
bool takes_turns(const std::vector<Work>& list) {
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i].op != Op::kForward || i == 0) continue;
    const Work& before = list[i - 1];
    const auto goes_on = [&](const Work& one) {
      return one.op == before.op && one.stage == before.stage && one.micro_batch == before.micro_batch;
    };
    if (before.op != Op::kBackwardP2 && std::any_of(list.begin() + static_cast<std::ptrdiff_t>(i), list.end(), goes_on))
      return true;
  }
  return false;
}

struct Seen {
  int compared = 0;
  int turns = 0;
  int turns_under_cap = 0;
};

void compare(uint64_t seed, Seen& seen) {
  Draw draw(seed);
  const Case c = draw_case(draw);
  const std::optional<Run> both = run(draw, c);
  if (!both) return;
  ++seen.compared;
  seen.turns += takes_turns(both->executed[0]) ? 1 : 0;
  seen.turns_under_cap += both->cap > 0 && takes_turns(both->executed[0]) ? 1 : 0;
  if (c.ranks == 1 && c.frozen == 0) {
    EXPECT_NEAR(both->executed_peak, both->simulated_peak, 0.01 * both->simulated_peak)
        << "seed " << seed << ": " << c << ", cap " << both->cap;
  }
  for (int rank = 0; rank < c.ranks; ++rank) {
    const auto& executed = both->executed[rank];
    const auto& simulated = both->simulated[rank];
    const size_t common = std::min(executed.size(), simulated.size());
    for (size_t i = 0; i < common; ++i) {
      ASSERT_TRUE(alike(executed[i], simulated[i]))
          << "seed " << seed << ": " << c << ", cap " << both->cap << ": rank " << rank << "\nexecuted\n"
          << text_of(executed, i) << "simulated\n"
          << text_of(simulated, i);
    }
    ASSERT_EQ(executed.size(), simulated.size()) << "seed " << seed << ": " << c << ": rank " << rank;
  }
}

TEST(WOrder, OfTheExecutorIsThatOfTheSimulation) {
  Seen seen;
  for (uint64_t seed = 1; seed <= 400 && !HasFailure(); ++seed) compare(seed, seen);
  EXPECT_GT(seen.compared, 300);
  EXPECT_GT(seen.turns, 20);
  EXPECT_GT(seen.turns_under_cap, 5);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
