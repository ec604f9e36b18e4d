#include "twobp/transport/transport.h"

#include "twobp/core/check.h"

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
    case MessageKind::kWeights:
      return concat("updated weights, step ", tag.step);
    case MessageKind::kStepReport:
      return concat("the report of step ", tag.step);
    case MessageKind::kClock:
      return "a reading of the clock";
    case MessageKind::kPart:
    case MessageKind::kSum:
      return "a sum (a collective)";
    case MessageKind::kBroadcast:
      return "a broadcast (a collective)";
    case MessageKind::kGather:
      return "a gathering (a collective)";
    case MessageKind::kBarrier:
      return "a barrier (a collective)";
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

}  // namespace twobp
