// A transport that counts what a rank sends, by group and kind.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "twobp/transport/subgroup.h"
#include "twobp/transport/transport.h"

namespace twobp::test {

using Counts = std::map<std::pair<Group, MessageKind>, int>;

inline int sum_of(const Counts& counts) {
  int sum = 0;
  for (const auto& [what, count] : counts) sum += count;
  return sum;
}

class Counted : public Transport {
 public:
  explicit Counted(std::unique_ptr<Transport> to) : to_(std::move(to)) {}
  int rank() const override { return to_->rank(); }
  int size() const override { return to_->size(); }
  void isend(int to, const Tag& tag, Values values) override {
    {
      const std::lock_guard lock(mutex_);
      ++sent_[{static_cast<Group>(tag.group), tag.kind}];
      for (const at::Tensor& tensor : values) bytes_ += static_cast<int64_t>(tensor.nbytes());
    }
    to_->isend(to, tag, std::move(values));
  }
  bool try_receive(int from, const Tag& tag, Values& values) override { return to_->try_receive(from, tag, values); }
  Values receive(int from, const Tag& tag, double timeout) override { return to_->receive(from, tag, timeout); }
  void progress() override { to_->progress(); }
  std::optional<int> unsent_to() override { return to_->unsent_to(); }
  void abort(const std::string& reason) override { to_->abort(reason); }

  // Since the last call.
  Counts sent() {
    const std::lock_guard lock(mutex_);
    return std::exchange(sent_, {});
  }
  int64_t sent_bytes() {
    const std::lock_guard lock(mutex_);
    return std::exchange(bytes_, 0);
  }

 private:
  std::unique_ptr<Transport> to_;
  std::mutex mutex_;
  Counts sent_;
  int64_t bytes_ = 0;
};

}  // namespace twobp::test
