#include "twobp/transport/subgroup.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/message.h"

namespace twobp {
namespace {

constexpr double kLeastPause = 20e-6;  // in seconds, between two polls; pauses grow
constexpr double kMostPause = 500e-6;
constexpr double kGrowth = 1.1;

}  // namespace

Subgroup::Subgroup(Transport& parent, std::vector<int> members, Group group)
    : parent_(parent), members_(std::move(members)), group_(group) {
  const auto here = std::find(members_.begin(), members_.end(), parent.rank());
  TWOBP_CHECK(here != members_.end(), "rank ", parent.rank(), " is not a member of the group");
  rank_ = static_cast<int>(here - members_.begin());
}

int Subgroup::member(int rank) const {
  TWOBP_CHECK(rank >= 0 && rank < size(), "rank ", rank_, " of a group addresses rank ", rank, ", but the group has ",
              size(), " ranks");
  return members_[rank];
}

GroupSums* Subgroup::sums_of(const std::vector<int>& ranks) {
  std::vector<int> of_parent;
  for (const int rank : ranks) of_parent.push_back(member(rank));
  return parent_.sums_of(of_parent);
}

// What the parent has sent to others counts, too: they share its connections.
std::optional<int> Subgroup::unsent_to() {
  const std::optional<int> to = parent_.unsent_to();
  if (!to) return std::nullopt;
  const auto member = std::find(members_.begin(), members_.end(), *to);
  return member == members_.end() ? rank_ : static_cast<int>(member - members_.begin());
}

Tag Subgroup::of_group(Tag tag) const {
  tag.group = static_cast<uint8_t>(group_);
  return tag;
}

void Subgroup::isend(int to, const Tag& tag, Values values) {
  parent_.isend(member(to), of_group(tag), std::move(values));
}

bool Subgroup::expect(int from, const Tag& tag, const Forms& forms) {
  return parent_.expect(member(from), of_group(tag), forms);
}

void Subgroup::isend_expected(int to, const Tag& tag, Values values) {
  parent_.isend_expected(member(to), of_group(tag), std::move(values));
}

bool Subgroup::try_receive(int from, const Tag& tag, Values& values) {
  return parent_.try_receive(member(from), of_group(tag), values);
}

Values Subgroup::receive(int from, const Tag& tag, double timeout) {
  if (group_ != Group::kProcesses) return parent_.receive(member(from), of_group(tag), timeout);
  const double deadline = awake_seconds() + timeout;
  Values values;
  for (double pause = kLeastPause; !try_receive(from, tag, values); pause = std::min(kGrowth * pause, kMostPause)) {
    parent_.progress();
    if (awake_seconds() > deadline) fail_waiting(rank_, timeout, tag, from);
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
  }
  return values;
}

}  // namespace twobp
