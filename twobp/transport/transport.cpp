#include "twobp/transport/transport.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/transport/message.h"

namespace twobp {

std::string to_string(const Tag& tag) {
  switch (tag.kind) {
    case MessageKind::kForward:
    case MessageKind::kBackward:
      return concat(tag.kind == MessageKind::kForward ? "the input" : "the output gradient", " of stage ", tag.stage,
                    ", micro-batch ", tag.micro_batch, ", step ", tag.step);
    case MessageKind::kEvaluation:
      return concat("the input of stage ", tag.stage, ", micro-batch ", tag.micro_batch, ", batch ", tag.step,
                    " of an evaluation");
    case MessageKind::kTiedGradient:
      return concat("a gradient of a weight that stages share, step ", tag.step);
    case MessageKind::kTiedWeight:
      return concat("the update of a weight that stages share, step ", tag.step);
    case MessageKind::kWeights:
      return concat("updated weights, step ", tag.step);
    case MessageKind::kClock:
      return "a reading of the clock";
    case MessageKind::kExperts:
      return concat("tokens of experts, micro-batch ", tag.micro_batch, ", step ", tag.step);
    case MessageKind::kOrder:
      return "the order of the messages of a plan";
    case MessageKind::kPart:
    case MessageKind::kSum:
      return "a sum (a collective)";
    case MessageKind::kBroadcast:
      return "a broadcast (a collective)";
    case MessageKind::kGather:
      return "a gathering (a collective)";
    case MessageKind::kEndOfWork:
      return "the end of work (a collective)";
    case MessageKind::kVerdict:
      return "a verdict (a collective)";
    case MessageKind::kNone:
      break;
  }
  return "a message";
}

void Transport::check_receiver(int to) const {
  TWOBP_CHECK(to >= 0 && to < size(), "rank ", rank(), " sends to rank ", to, ", but there are ", size(), " ranks");
}

void Transport::check_sender(int from) const {
  TWOBP_CHECK(from >= 0 && from < size(), "rank ", rank(), " receives from rank ", from, ", but there are ", size(),
              " ranks");
}

namespace {

constexpr const char* kAdvice = ": that rank is stuck or the time-out (pipeline.timeout) is too short";

constexpr const char* kAdviceOnMany = ": one of them is stuck or the time-out (pipeline.timeout) is too short";
constexpr size_t kMostRanksNamed = 8;

// Rounded, so that the rest of a time-out after an earlier wait is shown as the whole time-out.
std::string seconds_text(double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), seconds < 10 ? "%.2g s" : "%.0f s", seconds);
  return text.data();
}

}  // namespace

std::string names_of_ranks(const std::vector<int>& ranks) {
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(ranks.size(), kMostRanksNamed); ++i) names.push_back(std::to_string(ranks[i]));
  const size_t more = ranks.size() - names.size();
  return concat(ranks.size() == 1 ? "rank " : "ranks ", join(names), more > 0 ? concat(" and ", more, " more") : "");
}

void fail_waiting(int rank, double timeout, const Tag& tag, int from) {
  throw TimedOut(
      concat("rank ", rank, " waited ", seconds_text(timeout), " for ", to_string(tag), " from rank ", from, kAdvice));
}

void MessageWait::block(double seconds) {
  try {
    values = transport_.receive(from_, tag_, seconds);
    there_ = true;
  } catch (const TimedOut&) {  // wait_for() fails in the one way
  }
}

void MessageWait::fail(double timeout) const {
  fail_waiting(transport_.named(transport_.rank()), timeout, tag_, transport_.named(from_));
}

namespace {

class SentWait : public Wait {
 public:
  explicit SentWait(Transport& transport) : transport_(transport) {}
  WaitCause cause() const override { return WaitCause::kMessage; }
  bool ready() override {
    to_ = transport_.unsent_to();
    return !to_;
  }
  [[noreturn]] void fail(double timeout) const override {
    fail_sending(transport_.named(transport_.rank()), timeout, transport_.named(*to_));
  }

 private:
  Transport& transport_;
  std::optional<int> to_;
};

}  // namespace

void Transport::flush(double timeout) {
  SentWait sent(*this);
  wait_for(sent, timeout);
}

void fail_summing(int rank, double timeout, const std::vector<int>& ranks) {
  fail("rank ", rank, timeout > 0 ? concat(" waited ", seconds_text(timeout)) : " waited", " for a sum over ",
       names_of_ranks(ranks), kAdviceOnMany);
}

void fail_sending(int rank, double timeout, int to) {
  fail("rank ", rank, " waited ", seconds_text(timeout), " for rank ", to, " to take a message", kAdvice);
}

}  // namespace twobp
