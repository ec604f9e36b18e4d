// Some ranks of a transport as a transport of their own: the ranks of one pipeline, the same rank of all
// data-parallel replicas, or all of both.
#pragma once

#include <memory>
#include <vector>

#include "twobp/transport/transport.h"

namespace twobp {

// The purpose of a message between two ranks. Each group has its own tags.
enum class Group : uint8_t { kPipeline = 1, kReplicas = 2, kProcesses = 3, kRun = 4 };

// The processes' group is for the thread that runs the program, which shares its core with a rank. So its waits only
// poll now and then.
//
// Rank i of the group is rank `members`[i] of `parent`. The parent must outlive the group, and its own rank is one of
// the members. Aborting the group aborts the parent.
class Subgroup : public Transport {
 public:
  Subgroup(Transport& parent, std::vector<int> members, Group group);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  void isend(int to, const Tag& tag, Values values) override;
  bool expect(int from, const Tag& tag, const Forms& forms) override;
  void isend_expected(int to, const Tag& tag, Values values) override;
  bool try_receive(int from, const Tag& tag, Values& values) override;
  Values receive(int from, const Tag& tag, double timeout) override;
  void progress() override { parent_.progress(); }
  std::optional<int> unsent_to() override;
  int named(int rank) const override { return group_ == Group::kProcesses ? rank : parent_.named(members_.at(rank)); }
  GroupSums* sums_of(const std::vector<int>& ranks) override;
  void abort(const std::string& reason) override { parent_.abort(reason); }

 private:
  Tag of_group(Tag tag) const;
  int member(int rank) const;

  Transport& parent_;
  std::vector<int> members_;
  Group group_;
  int rank_ = -1;
};

}  // namespace twobp
