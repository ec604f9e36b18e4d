// A transport between threads that behaves like a network. Benchmarks and tests of overlap use it, because their ranks
// share one memory.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "twobp/transport/transport.h"

namespace twobp {

// Every ordered pair of ranks has a link. It carries one message at a time, in sending order, at `bytes_per_second` (0:
// no limit). The receiver gets a message `latency` seconds after its last byte was sent. All ends must be of this class
// and use the same clock. Sending takes no time on any rank.
class SlowLink : public Transport {
 public:
  SlowLink(std::unique_ptr<Transport> inner, double latency, double bytes_per_second);

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void isend(int to, const Tag& tag, Values values) override;
  bool try_receive(int from, const Tag& tag, Values& values) override;
  Values receive(int from, const Tag& tag, double timeout) override;
  void progress() override { inner_->progress(); }
  std::optional<int> unsent_to() override { return inner_->unsent_to(); }
  void abort(const std::string& reason) override { inner_->abort(reason); }

  // Applies to all later messages.
  void set_speed(double latency, double bytes_per_second);
  // Of all messages so far.
  double sent_bytes() const { return sent_bytes_; }

 private:
  // A message that was taken from the inner transport before its arrival time.
  struct Early {
    int from = 0;
    Tag tag;
    Values values;
    double arrives = 0;
  };
  // Returns the first early message with this sender and tag, or null. If there is none, it tries to take one from the
  // inner transport.
  Early* find(int from, const Tag& tag);

  std::unique_ptr<Transport> inner_;
  double latency_;
  double bytes_per_second_;
  double sent_bytes_ = 0;
  std::vector<double> free_at_;  // by receiver: the time when its link becomes free
  std::vector<Early> early_;
};

}  // namespace twobp
