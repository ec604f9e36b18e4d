// Sums one rank's gradients over the data-parallel replicas while its backward pass still runs. Parameters
// are cut into buckets in one fixed order, last layer first, which is about the order they are done in. A
// bucket's sum starts once its layers' last W is done and every bucket before it has started: replicas whose
// `fill` went different ways still start the same sums in the same order. Used by the rank's thread alone.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "twobp/nn/parameter.h"
#include "twobp/transport/collectives.h"

namespace twobp {

class GradientReducer {
 public:
  struct Item {
    Parameter* parameter = nullptr;
    int stage = 0;
    int layer = 0;     // within the stage
    std::string name;  // of the layer, for messages
  };

  // `items` in model order: trainable, their gradients allocated; the same on every replica. The gradients of
  // a bucket become parts of one tensor here, so that nothing is copied to sum them: call before anything
  // keeps a reference to one. A bucket has one stage and at least one parameter, and ends with the parameter
  // that reaches `bucket_bytes`. `replicas` connects this rank's places in all replicas and outlives this.
  GradientReducer(Transport& replicas, std::vector<Item> items, int64_t bucket_bytes);

  // A new step: no layer is done. What is left of one that failed is forgotten.
  void start();
  // The layer's gradients are complete on this replica. Layers without an item are no matter.
  void layer_done(int stage, int layer);
  // Takes what has arrived. Never blocks; costs nothing while no sum is under way.
  void progress();
  // Whether sums are under way, which a rank that waits for something else should keep going.
  bool busy() const { return !running_.empty(); }
  // Starts the sums that have not started and waits for all. Then every gradient is the sum, in the order of
  // the replicas; one that got nothing on a replica counts as zeros there. Throws Aborted, or Error after
  // `timeout` seconds without any of them ending, naming the bucket's layers.
  void finish(double timeout);

  struct Bucket {
    int stage = 0;
    std::vector<Item> items;
    at::Tensor flat;      // all its gradients one behind the other
    int layers_left = 0;  // in this step
    std::vector<int> layers;
  };
  const std::vector<Bucket>& buckets() const { return buckets_; }
  // How many buckets this step has started.
  size_t started() const { return next_; }

 private:
  struct Running {
    size_t bucket = 0;
    AllReduce sum;
  };

  void start_ready();
  void start_next();
  std::string describe(size_t bucket) const;

  Transport& replicas_;
  std::vector<Bucket> buckets_;
  size_t next_ = 0;  // the first bucket that has not started
  std::deque<Running> running_;
};

}  // namespace twobp
