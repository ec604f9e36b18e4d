// The exchanges of a mixture of experts whose experts are on several replicas (expert_group.h). Tokens go to the
// members that hold their experts, each once, and a row for each of its experts comes back. F has one such exchange
// there and one back, and so has I. What W reads stays where the expert is.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/nn/expert_group.h"

namespace twobp {

// What experts compute with.
struct ExpertInputs {
  at::Tensor x;        // (tokens, dim)
  at::Tensor ends;     // (sources * experts), on the host: ends of rows by source and expert (for_groups)
  at::Tensor places;   // (rows): the token of each
  at::Tensor weights;  // (rows, 1)
};

// What went where, for the way back and for I.
struct ExpertWay {
  at::Tensor tokens;  // of this replica, by the member that they went to
  at::Tensor counts;  // (4, members), on the host: tokens and rows to each, tokens and rows from each
};

// Sends this replica's tokens, whose rows are sorted by expert, and returns those of all members for its own experts,
// sorted by member. `meanwhile` runs while they are on their way. Throws Error for a message that does not fit.
ExpertInputs to_experts(ExpertGroup& group, ExpertShare share, const ExpertInputs& here, ExpertWay& way,
                        const std::function<void()>& meanwhile);
// The same way for the gradients of the tokens' outputs.
at::Tensor gradients_to_experts(ExpertGroup& group, ExpertShare share, const ExpertWay& way, const at::Tensor& dy,
                                const std::function<void()>& meanwhile);
// Sends the rows of all members back. Returns those of this replica's tokens, sorted by expert.
Values from_experts(ExpertGroup& group, ExpertShare share, const ExpertWay& way, const Values& rows);

// The group of an F that runs again, whose tokens do not count. Another F may count meanwhile, in an exchange's wait,
// so its counts could not be put back afterwards.
class CountedExperts : public ExpertGroup {
 public:
  explicit CountedExperts(ExpertGroup& group) : group_(group) {}

  void send(std::vector<Values> messages) override { group_.send(std::move(messages)); }
  std::vector<Values> receive() override { return group_.receive(); }

 private:
  ExpertGroup& group_;
};

}  // namespace twobp
