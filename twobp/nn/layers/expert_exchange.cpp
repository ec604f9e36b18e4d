#include "twobp/nn/layers/expert_exchange.h"

#include <limits>
#include <utility>
#include <vector>

#include "twobp/core/check.h"

namespace twobp {
namespace {

enum Counted : uint8_t { kTokensTo, kRowsTo, kTokensFrom, kRowsFrom };

int64_t* counts_of(const ExpertWay& way, Counted counted) {
  return way.counts.mutable_data_ptr<int64_t>() + counted * way.counts.size(1);
}

template <typename... What>
void require(bool holds, int member, const What&... what) {
  TWOBP_CHECK(holds, "member ", member, " of a group of experts sent ", what...,
              ": do all processes run the same version of twobp?");
}

// A tensor of `rows` rows like those of `like`.
void require_rows(const at::Tensor& tensor, int64_t rows, const at::Tensor& like, int member) {
  require(tensor.defined() && tensor.scalar_type() == like.scalar_type() && tensor.dim() == like.dim() &&
              tensor.size(0) == rows && tensor.sizes().slice(1) == like.sizes().slice(1),
          member, tensor.defined() ? tensor.sizes() : at::IntArrayRef(), " numbers where ", rows, " rows like ",
          like.sizes(), " belong");
}

// The tokens that a member sent. The counts say how many rows they have.
void require_tokens(const Values& message, const ExpertInputs& here, int64_t experts, int member) {
  require(message.size() == 4 && message[0].defined() && message[0].scalar_type() == at::kLong &&
              message[0].sizes() == at::IntArrayRef({experts}) && message[1].defined() &&
              message[1].scalar_type() == at::kInt && message[1].dim() == 1 && message[2].defined() &&
              message[2].dim() == 2,
          member, "something else than tokens");
  const at::Tensor& places = message[1];
  int64_t before = 0;
  for (int64_t i = 0; i < experts; ++i) {
    const int64_t end = message[0].const_data_ptr<int64_t>()[i];
    require(end >= before && end <= places.numel(), member, "rows of an expert that end at ", end, " of ",
            places.numel());
    before = end;
  }
  require(before == places.numel(), member, places.numel(), " rows, but counts for ", before);
  require_rows(message[2], message[2].size(0), here.x, member);
  require_rows(message[3], places.numel(), here.weights, member);
  if (places.numel() == 0) return;
  require(places.min().item<int>() >= 0 && places.max().item<int>() < message[2].size(0), member,
          "rows of tokens that it did not send");
}

std::vector<Values> exchange(ExpertGroup& group, ExpertShare share, std::vector<Values> messages,
                             const std::function<void()>& meanwhile = {}) {
  Values own = std::exchange(messages[static_cast<size_t>(share.index)], {});
  group.send(std::move(messages));
  if (meanwhile) meanwhile();
  std::vector<Values> received = group.receive();
  received[static_cast<size_t>(share.index)] = std::move(own);
  return received;
}

at::Tensor joined(const std::vector<Values>& messages, size_t i) {
  std::vector<at::Tensor> all;
  for (const Values& message : messages) all.push_back(message[i]);
  return at::cat(all);
}

}  // namespace

ExpertInputs to_experts(ExpertGroup& group, ExpertShare share, const ExpertInputs& here, ExpertWay& way,
                        const std::function<void()>& meanwhile) {
  const int64_t experts = here.ends.size(0) / share.of;
  TWOBP_CHECK(here.x.size(0) <= std::numeric_limits<int>::max(), "a micro-batch of ", here.x.size(0),
              " tokens is too large for pipeline.experts: make it smaller");
  way.counts = at::zeros({4, share.of}, at::kLong);
  std::vector<Values> messages;
  std::vector<at::Tensor> tokens;
  int64_t begin = 0;
  for (int member = 0; member < share.of; ++member) {
    const at::Tensor ends = here.ends.narrow(0, member * experts, experts);
    const int64_t rows = ends[-1].item<int64_t>() - begin;
    const auto [sent, places] = at::_unique(here.places.narrow(0, begin, rows), /*sorted=*/true,
                                            /*return_inverse=*/true);
    tokens.push_back(sent);
    counts_of(way, kTokensTo)[member] = sent.numel();
    counts_of(way, kRowsTo)[member] = rows;
    messages.push_back(
        {ends - begin, places.to(at::kInt), here.x.index_select(0, sent), here.weights.narrow(0, begin, rows)});
    begin += rows;
  }
  way.tokens = at::cat(tokens);
  std::vector<Values> received = exchange(group, share, std::move(messages), meanwhile);
  int64_t first_row = 0;
  int64_t first_token = 0;
  for (int member = 0; member < share.of; ++member) {
    Values& message = received[static_cast<size_t>(member)];
    require_tokens(message, here, experts, member);
    counts_of(way, kTokensFrom)[member] = message[2].size(0);
    counts_of(way, kRowsFrom)[member] = message[1].numel();
    message[0] = message[0] + first_row;
    message[1] = message[1].to(at::kLong) + first_token;
    first_row += message[1].numel();
    first_token += message[2].size(0);
  }
  return {joined(received, 2), joined(received, 0), joined(received, 1), joined(received, 3)};
}

at::Tensor gradients_to_experts(ExpertGroup& group, ExpertShare share, const ExpertWay& way, const at::Tensor& dy,
                                const std::function<void()>& meanwhile) {
  std::vector<Values> messages;
  int64_t begin = 0;
  for (int member = 0; member < share.of; ++member) {
    const int64_t count = counts_of(way, kTokensTo)[member];
    messages.push_back({dy.index_select(0, way.tokens.narrow(0, begin, count))});
    begin += count;
  }
  const std::vector<Values> received = exchange(group, share, std::move(messages), meanwhile);
  for (int member = 0; member < share.of; ++member) {
    const Values& message = received[static_cast<size_t>(member)];
    require(message.size() == 1, member, message.size(), " tensors of gradients");
    require_rows(message[0], counts_of(way, kTokensFrom)[member], dy, member);
  }
  return joined(received, 0);
}

Values from_experts(ExpertGroup& group, ExpertShare share, const ExpertWay& way, const Values& rows) {
  std::vector<Values> messages;
  int64_t begin = 0;
  for (int member = 0; member < share.of; ++member) {
    const int64_t count = counts_of(way, kRowsFrom)[member];
    Values& message = messages.emplace_back();
    for (const at::Tensor& one : rows) message.push_back(one.narrow(0, begin, count));
    begin += count;
  }
  const std::vector<Values> received = exchange(group, share, std::move(messages));
  Values result;
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int member = 0; member < share.of; ++member) {
      const Values& message = received[static_cast<size_t>(member)];
      require(message.size() == rows.size(), member, message.size(), " tensors of results");
      require_rows(message[i], counts_of(way, kRowsTo)[member], rows[i], member);
    }
    result.push_back(joined(received, i));
  }
  return result;
}

}  // namespace twobp
