// Tests the messages of experts on several replicas: what comes from a peer is checked before it is used.
#include "twobp/nn/layers/expert_exchange.h"

#include <functional>

#include <gtest/gtest.h>

#include "tests/expect_error.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr int64_t kDim = 3;

// Member 1 answers to each message of member 0 as `peer` says.
class Answers : public ExpertGroup {
 public:
  explicit Answers(std::function<Values(Values)> peer) : peer_(std::move(peer)) {}
  void send(std::vector<Values> messages) override { messages_ = std::move(messages); }
  std::vector<Values> receive() override { return {{}, peer_(std::move(messages_[1]))}; }

 private:
  std::function<Values(Values)> peer_;
  std::vector<Values> messages_;
};

// Three tokens; four experts, of which each member has two. The rows: expert 0 has token 1, expert 2 tokens 0 and 1,
// expert 3 token 0. Token 2 has no expert.
ExpertInputs inputs() {
  return {at::arange(3 * kDim, at::kFloat).view({3, kDim}), at::tensor({1, 1, 3, 4}, at::kLong),
          at::tensor({1, 0, 1, 0}, at::kLong), at::tensor({1.F, 2.F, 3.F, 4.F}).view({4, 1})};
}

constexpr ExpertShare kFirst{2, 0};

TEST(ExpertExchange, TakesEachTokenOnceAndGivesEachRowBack) {
  ExpertWay way;
  Answers echo([](Values message) { return message; });
  bool meanwhile = false;
  const ExpertInputs all = to_experts(echo, kFirst, inputs(), way, [&] { meanwhile = true; });
  EXPECT_TRUE(meanwhile);
  // Its own token 1, and tokens 0 and 1 of the echo.
  EXPECT_TRUE(at::equal(all.x, inputs().x.index_select(0, at::tensor({1, 0, 1}, at::kLong))));
  EXPECT_TRUE(at::equal(all.ends, at::tensor({1, 1, 3, 4}, at::kLong)));
  EXPECT_TRUE(at::equal(all.places, at::tensor({0, 1, 2, 1}, at::kLong)));
  EXPECT_TRUE(at::equal(all.weights, inputs().weights));
  EXPECT_TRUE(at::equal(way.counts, at::tensor({1, 2, 1, 3, 1, 2, 1, 3}, at::kLong).view({4, 2})));
  const at::Tensor rows = at::arange(8, at::kFloat).view({4, 2});
  const Values back = from_experts(echo, kFirst, way, {rows, rows.select(1, 0)});
  EXPECT_TRUE(at::equal(back.at(0), rows));
  EXPECT_TRUE(at::equal(back.at(1), rows.select(1, 0)));
  const at::Tensor dy = gradients_to_experts(echo, kFirst, way, inputs().x, {});
  EXPECT_TRUE(at::equal(dy, all.x));
}

TEST(ExpertExchange, RefusesMoreTokensThanItsNumbersCount) {
  ExpertInputs here = inputs();
  here.x = at::empty({int64_t{1} << 31U, 0});
  ExpertWay way;
  Answers echo([](Values message) { return message; });
  test::expect_error([&] { to_experts(echo, kFirst, here, way, {}); }, {"2147483648 tokens", "too large"});
}

TEST(ExpertExchange, AMemberMayGetNoToken) {
  ExpertInputs here = inputs();
  here.ends = at::tensor({1, 4, 4, 4}, at::kLong);
  ExpertWay way;
  Answers echo([](Values message) { return message; });
  const ExpertInputs all = to_experts(echo, kFirst, here, way, {});
  EXPECT_EQ(all.x.size(0), 2);
  EXPECT_TRUE(at::equal(all.ends, at::tensor({1, 4, 4, 4}, at::kLong)));
  EXPECT_EQ(from_experts(echo, kFirst, way, {at::ones({4, kDim})}).at(0).size(0), 4);
}

TEST(ExpertExchange, RefusesMessagesThatDoNotFit) {
  using Change = std::function<void(Values&)>;
  const std::vector<std::pair<Change, std::string>> changes = {
      {[](Values& m) { m.pop_back(); }, "something else than tokens"},
      {[](Values& m) {
         m[0] = at::tensor({2, 1, 3}, at::kLong);
       },
       "something else than tokens"},
      {[](Values& m) { m[0] = m[0].to(at::kDouble); }, "something else than tokens"},
      {[](Values& m) { m[1] = at::Tensor(); }, "something else than tokens"},
      {[](Values& m) {
         m[0] = at::tensor({3, 2}, at::kLong);
       },
       "end at 2 of 3"},
      {[](Values& m) {
         m[0] = at::tensor({-1, 3}, at::kLong);
       },
       "end at -1 of 3"},
      {[](Values& m) {
         m[0] = at::tensor({int64_t{1}, int64_t{1} << 62}, at::kLong);
       },
       "of 3"},
      {[](Values& m) {
         m[0] = at::tensor({1, 2}, at::kLong);
       },
       "3 rows, but counts for 2"},
      {[](Values& m) {
         m[1] = at::tensor({0, 2, 0}, at::kInt);
       },
       "tokens that it did not send"},
      {[](Values& m) {
         m[1] = at::tensor({0, -1, 0}, at::kInt);
       },
       "tokens that it did not send"},
      {[](Values& m) {
         m[2] = at::ones({2, kDim + 1});
       },
       "2 rows like"},
      {[](Values& m) { m[2] = m[2].to(at::kDouble); }, "2 rows like"},
      {[](Values& m) {
         m[3] = at::ones({2, 1});
       },
       "3 rows like"}};
  for (const auto& [change, part] : changes) {
    Answers peer([&](Values message) {
      change(message);
      return message;
    });
    ExpertWay way;
    test::expect_error([&] { to_experts(peer, kFirst, inputs(), way, {}); }, {"member 1", part});
  }
  ExpertWay way;
  Answers echo([](Values message) { return message; });
  to_experts(echo, kFirst, inputs(), way, {});
  Answers shorter([](const Values& message) { return Values{message[0].narrow(0, 0, 1)}; });
  test::expect_error([&] { from_experts(shorter, kFirst, way, {at::ones({4, kDim})}); }, {"member 1", "3 rows like"});
  test::expect_error([&] { gradients_to_experts(shorter, kFirst, way, inputs().x, {}); }, {"member 1", "2 rows like"});
  Answers nothing([](const Values&) { return Values(); });
  test::expect_error([&] { from_experts(nothing, kFirst, way, {at::ones({4, kDim})}); }, {"member 1", "0 tensors"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
