// A transport of threads that behaves like a network: for benchmarks and tests of overlap, where all ranks
// share one memory.
#pragma once

#include <memory>
#include <vector>

#include "twobp/transport/transport.h"

namespace twobp {

// Every ordered pair of ranks has a link that carries one message at a time, in the order they are sent, at
// `bytes_per_second` (0: no limit); the receiver has it `latency` seconds after its last byte. All ends must
// be such links, on one clock. Costs no rank any time to send.
class SlowLink : public Transport {
 public:
  SlowLink(std::unique_ptr<Transport> inner, double latency, double bytes_per_second);

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void isend(int to, const Tag& tag, Values values) override;
  bool try_receive(int from, const Tag& tag, Values& values) override;
  Values receive(int from, const Tag& tag, double timeout) override;
  void progress() override { inner_->progress(); }
  void flush(double timeout) override { inner_->flush(timeout); }
  void abort(const std::string& reason) override { inner_->abort(reason); }

  // From the next message on.
  void set_speed(double latency, double bytes_per_second);

 private:
  // Taken from the inner transport before its time.
  struct Early {
    int from = 0;
    Tag tag;
    Values values;
    double arrives = 0;
  };
  // The first early one of these; null: none. Takes one from the inner transport if there is none.
  Early* find(int from, const Tag& tag);

  std::unique_ptr<Transport> inner_;
  double latency_;
  double bytes_per_second_;
  std::vector<double> free_at_;  // by receiver: when the link there is free
  std::vector<Early> early_;
};

}  // namespace twobp
