// Tests generation: the cache changes nothing, and sampling follows its options.
#include "twobp/train/generator.h"

#include <cmath>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/train/build_model.h"

namespace twobp::TWOBP_FILE {
namespace {

std::vector<int64_t> generate(Generator& generator, const std::vector<int64_t>& prompt, int64_t count,
                              const SamplingOptions& options) {
  std::vector<int64_t> tokens;
  generator.generate(prompt, count, options, [&](int64_t token) {
    tokens.push_back(token);
    return true;
  });
  return tokens;
}

// Generation is greedy. Each token must be the choice of a new generator without a cache, given all previous tokens.
TEST(Generator, TheCacheChangesNothing) {
  ModelConfig config = test::tiny_config().model;
  Generator cached(build_model(config));
  Generator fresh(build_model(config));
  const std::vector<int64_t> prompt = {3, 14, 15, 9, 2, 6};
  const std::vector<int64_t> tokens = generate(cached, prompt, 12, {.temperature = 0});
  ASSERT_EQ(tokens.size(), 12u);
  std::vector<int64_t> all = prompt;
  for (const int64_t token : tokens) {
    EXPECT_EQ(generate(fresh, all, 1, {.temperature = 0}).at(0), token) << "after " << all.size();
    all.push_back(token);
  }
  EXPECT_GT(std::set<int64_t>(tokens.begin(), tokens.end()).size(), 1u) << "a model that repeats shows nothing";
  EXPECT_EQ(generate(cached, prompt, 12, {.temperature = 0}), tokens) << "a new prompt starts anew";
}

TEST(Generator, DependsOnTheSeed) {
  Generator generator(build_model(test::tiny_config().model));
  const auto a = generate(generator, {1}, 20, {.temperature = 2, .seed = 1});
  EXPECT_EQ(generate(generator, {1}, 20, {.temperature = 2, .seed = 1}), a);
  EXPECT_NE(generate(generator, {1}, 20, {.temperature = 2, .seed = 2}), a);
}

TEST(Generator, StopsWhenTold) {
  Generator generator(build_model(test::tiny_config().model));
  int count = 0;
  generator.generate({1}, 20, {}, [&](int64_t) { return ++count < 3; });
  EXPECT_EQ(count, 3);
}

TEST(Generator, RefusesBadPrompts) {
  Generator generator(build_model(test::tiny_config().model));
  test::expect_error([&] { generate(generator, {}, 1, {}); }, {"prompt"});
  test::expect_error([&] { generate(generator, {test::kVocab}, 1, {}); }, {"outside the vocabulary"});
}

std::map<int64_t, int> counts(const std::vector<double>& logits, const SamplingOptions& options, int draws) {
  std::mt19937_64 random(7);
  std::map<int64_t, int> seen;
  for (int i = 0; i < draws; ++i) ++seen[sample(at::tensor(logits, at::kDouble), options, random)];
  return seen;
}

TEST(Sample, FollowsTheProbabilities) {
  const int draws = 20000;
  const std::vector<double> logits = {std::log(0.5), std::log(0.3), std::log(0.2)};
  auto seen = counts(logits, {}, draws);
  // The tolerance is four standard deviations of a binomial count.
  EXPECT_NEAR(seen[0], 0.5 * draws, 4 * std::sqrt(0.25 * draws));
  EXPECT_NEAR(seen[1], 0.3 * draws, 4 * std::sqrt(0.21 * draws));
  EXPECT_NEAR(seen[2], 0.2 * draws, 4 * std::sqrt(0.16 * draws));
  // Half the temperature squares the probabilities: 25 : 9 : 4.
  seen = counts(logits, {.temperature = 0.5}, draws);
  EXPECT_NEAR(seen[0], 25. / 38 * draws, 4 * std::sqrt(0.23 * draws));
  EXPECT_EQ(counts(logits, {.temperature = 0}, 100).at(0), 100);
}

TEST(Sample, TopPKeepsTheFewestThatReachIt) {
  const std::vector<double> logits = {std::log(0.2), std::log(0.5), std::log(0.3)};
  EXPECT_EQ(counts(logits, {.top_p = 0.4}, 1000).size(), 1u);
  auto seen = counts(logits, {.top_p = 0.6}, 1000);
  EXPECT_EQ(seen.size(), 2u);
  EXPECT_FALSE(seen.contains(0));
  EXPECT_EQ(counts(logits, {.top_p = 0.9}, 1000).size(), 3u);
  EXPECT_EQ(counts(logits, {.top_p = 0}, 1000).at(1), 1000);
}

TEST(Sample, RefusesLogitsThatAreNotFinite) {
  test::expect_error([] { counts({NAN, NAN}, {}, 1); }, {"not finite"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
