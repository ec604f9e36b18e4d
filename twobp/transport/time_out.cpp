#include "twobp/transport/time_out.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
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
  fail("rank ", rank, " waited ", seconds_text(timeout), " for ", to_string(tag), " from rank ", from, kAdvice);
}

void fail_summing(int rank, double timeout, const std::vector<int>& ranks) {
  fail("rank ", rank, timeout > 0 ? concat(" waited ", seconds_text(timeout)) : " waited", " for a sum over ",
       names_of_ranks(ranks), kAdviceOnMany);
}

void fail_sending(int rank, double timeout, int to) {
  fail("rank ", rank, " waited ", seconds_text(timeout), " for rank ", to, " to take a message", kAdvice);
}

}  // namespace twobp
