#include "twobp/pipeline/report_exchange.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/transport/collectives.h"

namespace twobp {
namespace {

// Every number is a double: counts and bytes are far below 2^53. One list of fields serves reading and writing.
class Writer {
 public:
  template <typename T>
  void operator()(T& value) {
    numbers_.push_back(static_cast<double>(value));
  }
  void time(double& seconds) { (*this)(seconds); }
  at::Tensor tensor() const { return at::tensor(numbers_, at::kDouble); }

 private:
  std::vector<double> numbers_;
};

class Reader {
 public:
  Reader(const at::Tensor& numbers, double clock_ahead)
      : numbers_(numbers.to(at::kDouble).contiguous()), clock_ahead_(clock_ahead) {}

  template <typename T>
  void operator()(T& value) {
    TWOBP_CHECK(at_ < numbers_.numel(), "a report of ", numbers_.numel(), " numbers is too short",
                ": do all processes run the same version of twobp?");
    value = static_cast<T>(numbers_.const_data_ptr<double>()[at_++]);
  }
  void time(double& seconds) {
    (*this)(seconds);
    seconds -= clock_ahead_;
  }
  bool done() const { return at_ == numbers_.numel(); }

 private:
  at::Tensor numbers_;
  double clock_ahead_;
  int64_t at_ = 0;
};

template <typename Visit>
void visit(MemoryUse& use, Visit& each) {
  for (int64_t& bytes : use.now) each(bytes);
  for (int64_t& bytes : use.at_peak) each(bytes);
  each(use.peak);
}

template <typename Visit>
void visit(ProductTime& products, Visit& each) {
  each(products.seconds);
  each(products.operations);
}

template <typename Visit>
void visit(StepReport& report, const std::vector<int>& ranks, const std::vector<int>& stages, Visit& each) {
  each.time(report.begin);
  each.time(report.end);
  for (const int r : ranks) {
    RankTimes& times = report.ranks.at(r);
    each.time(times.begin);
    each.time(times.end);
    each(times.optimizer);
    each(times.busy);
    visit(times.products, each);
    each(times.allocations);
    each(times.exposed);
    for (double& seconds : times.idle) each(seconds);
    each(times.instructions);
    visit(report.rank_memory.at(r), each);
  }
  for (const int s : stages) {
    StageTimes& times = report.stages.at(s);
    each(times.forward);
    each(times.backward_p1);
    each(times.backward_p2);
    each(times.micro_batches);
    each(times.p2_units);
    visit(times.p2_products, each);
    visit(report.stage_memory.at(s), each);
  }
}

// The callers handle enumerations and the name.
template <typename Visit>
void visit(Event& event, Visit& each) {
  for (int* field :
       {&event.stage, &event.micro_batch, &event.count, &event.part, &event.layer, &event.unit, &event.peer}) {
    each(*field);
  }
  for (int64_t* field : {&event.bytes, &event.held, &event.total, &event.peak}) each(*field);
  each.time(event.begin);
  each.time(event.end);
}

}  // namespace

Values pack_report(const StepReport& report, const std::vector<int>& ranks, const std::vector<int>& stages) {
  StepReport copy = report;  // the list of fields serves reading and writing, so it needs a mutable report
  Writer times;
  visit(copy, ranks, stages, times);
  Values packed = {times.tensor()};
  if (report.events.empty()) return packed;
  Writer numbers;
  std::vector<uint8_t> names;
  for (const int r : ranks) {
    auto count = static_cast<double>(copy.events.at(r).size());
    numbers(count);
    for (Event& event : copy.events[r]) {
      auto kind = static_cast<int>(event.kind);
      auto cause = static_cast<int>(event.cause);
      auto length = static_cast<double>(event.name.size());
      numbers(kind);
      numbers(cause);
      numbers(length);
      visit(event, numbers);
      names.insert(names.end(), event.name.begin(), event.name.end());
    }
  }
  packed.push_back(numbers.tensor());
  packed.push_back(at::tensor(names, at::kByte));
  return packed;
}

void unpack_report(const Values& packed, const std::vector<int>& ranks, const std::vector<int>& stages,
                   double clock_ahead, StepReport& report) {
  TWOBP_CHECK(packed.size() == 1 || packed.size() == 3, "a report has ", packed.size(),
              " tensors, but must have 1 or 3");
  const double begin = report.begin;
  const double end = report.end;
  Reader times(packed[0], clock_ahead);
  visit(report, ranks, stages, times);
  TWOBP_CHECK(times.done(), "a report has more numbers than its ranks and stages need");
  // The common step begins with the first process and ends with the last.
  report.begin = std::min(begin, report.begin);
  report.end = std::max(end, report.end);
  if (packed.size() == 1) return;
  report.events.resize(report.ranks.size());
  Reader numbers(packed[1], clock_ahead);
  const at::Tensor names = packed[2].to(at::kByte).contiguous();
  const auto* text = reinterpret_cast<const char*>(names.const_data_ptr<uint8_t>());
  int64_t at = 0;
  for (const int r : ranks) {
    int64_t count = 0;
    numbers(count);
    for (int64_t i = 0; i < count; ++i) {
      Event event;
      int kind = 0;
      int cause = 0;
      int64_t length = 0;
      numbers(kind);
      numbers(cause);
      numbers(length);
      visit(event, numbers);
      TWOBP_CHECK(length >= 0 && length <= names.numel() - at, "a report's names are cut off");
      TWOBP_CHECK(kind >= 0 && kind <= static_cast<int>(Event::Kind::kReceive) && cause >= 0 && cause < kIdleCauses,
                  "a report has an event of unknown kind");
      event.kind = static_cast<Event::Kind>(kind);
      event.cause = static_cast<IdleCause>(cause);
      event.name.assign(text + at, static_cast<size_t>(length));
      at += length;
      report.events.at(r).push_back(std::move(event));
    }
  }
}

std::vector<Values> exchange_report(const World& world, double timeout, StepReport& report, const Values& packed,
                                    const std::vector<at::Tensor>& numbers) {
  Transport& processes = *world.processes;
  if (processes.size() == 1) return {};
  // Each replica's loss has a place of its own, so that the sum is in their order.
  std::vector<at::Tensor> all = {at::zeros({world.replicas + 3}, at::kDouble)};
  auto* own = all[0].mutable_data_ptr<double>();
  own[world.replica] = report.loss;
  own += world.replicas;
  own[0] = static_cast<double>(report.right.value_or(0));
  own[1] = report.right ? 1 : 0;
  own[2] = report.stop ? 1 : 0;
  std::vector<int64_t> lengths = {all[0].numel()};
  for (const at::Tensor& one : numbers) {
    all.push_back(one);
    lengths.push_back(one.numel());
  }
  const at::Tensor sums = at::cat(all);
  // The first ranks have most to send when they sum the norm (RankUpdate), so here the last ones have.
  std::vector<int> order = {0};
  for (int process = processes.size() - 1; process > 0; --process) order.push_back(process);
  Exchange exchange(processes, sums, 0, WaitCause::kMessage, Exchange::Adds::kOnTheWay, packed, std::move(order));
  wait_for(exchange, timeout);
  const std::vector<at::Tensor> parts = sums.split_with_sizes(lengths);
  const auto* values = parts[0].const_data_ptr<double>();
  report.loss = 0;
  for (int replica = 0; replica < world.replicas; ++replica) report.loss += *values++;
  if (values[1] > 0) report.right = static_cast<int64_t>(values[0]);
  report.stop = values[2] > 0;
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i].copy_(parts[1 + i]);
  return exchange.notes();
}

}  // namespace twobp
