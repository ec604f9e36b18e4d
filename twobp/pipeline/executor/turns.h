// Internal to the loop of a rank: exchanges of tokens of experts, and who runs while one is under way.
#pragma once

#include <optional>
#include <vector>

#include "twobp/pipeline/executor/step_loop.h"

namespace twobp {

// The exchanges of an F or I (nn/expert_group.h). Its messages are awaited as all others, so W runs meanwhile.
class StepLoop::Experts : public ExpertGroup {
 public:
  explicit Experts(StepLoop& loop) : loop_(loop), members_(loop.parts_.experts) {}

  void at(const Stage& stage, int layer, int micro_batch, bool backward);
  bool count(const at::Tensor& tokens) override;
  void send(std::vector<Values> messages) override;
  std::vector<Values> receive() override;

  // Exchanges of this F or I that are over.
  int over() const { return over_; }
  bool backward() const { return backward_; }
  // Bytes that it may still need, from the layer under way on.
  double room() const;

 private:
  Tag tag() const;

  StepLoop& loop_;
  Transport* members_;  // null: this replica alone
  const Stage* stage_ = nullptr;
  int layer_ = 0;  // of the stage
  bool backward_ = false;
  Tag tag_;
  int number_ = 0;  // of this call of the layer
  int over_ = 0;
};

// While an F or I waits for tokens, the F after it in the list runs on a stack of its own (Companion) until that waits
// for tokens, or for room. The first goes on as soon as its tokens are there, and the second never overtakes it: F
// changes buffers in the order of the list. So every rank sends what the list before it needs, whatever else it runs,
// and a message's tag says what it is for: members of a group need not take turns at the same places.
class StepLoop::Turns {
 public:
  explicit Turns(StepLoop& loop);
  // Ends the second if it is under way, because the first has failed.
  void end();

  // Whether the second one calls.
  bool is_second() const { return begun_ && loop_.parts_.companion->is_here(); }
  // Of the one that calls.
  Experts& experts() { return is_second() ? second_ : first_; }

  // The first waits: runs the second, unless that must wait, too. Returns whether it ran.
  bool take(const Wait& awaited);
  // Whether the second waits for tokens, and may go on when they are there.
  bool awaits_tokens() const;
  bool ready() const;
  void go_on();
  // The second waits.
  void yield(Wait* awaited) { loop_.parts_.companion->yield(awaited); }
  // The second waits until these bytes fit beside what the first may need, or the list comes to the second.
  void make_room(double need);
  // Ends the list's instruction if it is the second. Returns whether it is.
  bool finish();
  // Throws the second one's error, if it has failed.
  void rethrow() const;

 private:
  bool begin();
  bool lacks_room(double need) const;

  StepLoop& loop_;
  bool on_;
  Experts first_, second_;
  std::optional<size_t> begun_;  // an instruction, whose end the list has not seen
  double need_ = 0;              // bytes for which the second has yielded
};

}  // namespace twobp
