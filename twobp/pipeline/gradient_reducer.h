// Sums one rank's gradients over the data-parallel replicas while its backward pass still runs. Parameters are cut into
// buckets in one fixed order, last layer first, which is roughly the order in which their gradients are finished. The
// sum of a bucket starts when the last W of its layers is done and every earlier bucket has started. So replicas whose
// `fill` took different decisions still start the same sums in the same order. Only the rank's thread uses it.
//
// On a device, the sums have a stream of their own, and F, I and W do not wait for them. A sum begins when the device
// has made its gradients. If its stream waited for them, earlier sums, whose messages come late, would wait there, too.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "twobp/core/wait.h"
#include "twobp/nn/device/device.h"
#include "twobp/nn/parameter.h"
#include "twobp/transport/collectives.h"

namespace twobp {

// The numbers [begin, end) of a parameter, in the order of its memory, and the one replica that needs their sum.
struct Cut {
  int owner = 0;
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const Cut&) const = default;
};

// Numbers of a tensor without gaps, flat.
inline at::Tensor numbers_between(const at::Tensor& tensor, int64_t begin, int64_t end) {
  return tensor.as_strided({end - begin}, {1}, tensor.storage_offset() + begin);
}

class GradientReducer {
 public:
  struct Item {
    Parameter* parameter = nullptr;
    int stage = 0;
    int layer = 0;               // within the stage
    std::string name;            // of the layer, for error messages
    std::vector<Cut> cuts = {};  // into shares; all items have some, or none has
  };

  // `items` are in model order: trainable, with gradients allocated or streamed, and the same on every replica. The
  // constructor makes the gradients of a bucket parts of one tensor, so that summing copies nothing. Call it before
  // anything keeps a reference to a gradient. A bucket has one stage and at least one parameter, and ends with the
  // parameter that reaches `bucket_bytes`. A streamed gradient, and one by source, is a bucket of its own. `replicas`
  // connects this rank with the same rank of all replicas, and `holders` with those of them that hold the same experts,
  // in the same order; null: no gradient is by source. Both outlive this object. The gradients are on `device`.
  GradientReducer(Transport& replicas, std::vector<Item> items, int64_t bucket_bytes, Device device = {},
                  Transport* holders = nullptr);

  // Begins a step: no layer is done. Forgets what is left of a failed step.
  void start();
  // The work that completes the layer's gradients on this replica has been launched in the compute stream. Layers
  // without an item are ignored.
  void layer_done(int stage, int layer);
  // The same of one streamed gradient. Parameters without an item are ignored.
  void gradient_done(const Parameter& parameter);
  // The streamed gradients whose sums have ended since the last call. Others may still read what this replica does not
  // own of them; it may be forgotten, but not changed. Work that is launched into the compute stream from now on reads
  // the sums.
  std::vector<Parameter*> take_summed();
  bool has_summed() const { return !summed_.empty(); }
  // Takes the messages that have arrived. Never blocks. Costs nothing while no sum is under way.
  void progress();
  // Whether sums are under way, or begin soon. A rank that waits for something else should keep them going.
  bool busy() const { return !running_.empty() || !made_.empty(); }
  // Starts the remaining sums and waits for all. Then every gradient is the sum, in the order of the replicas, for work
  // that is launched into the compute stream from now on. If items have cuts, this holds of the replica's own numbers;
  // the others may change as ReduceScatter says. A gradient that a replica did not compute counts as zeros; streamed
  // ones are made while there is room. `meanwhile` is called between two looks. Throws Aborted. Throws Error, naming
  // the bucket's layers, if none of the sums ends within the time-out.
  void finish(const Patience& patience, const std::function<void()>& meanwhile = {});
  // Whether streamed gradients that are done, and still have memory, because a replica has not read it or take_summed()
  // has not given them out, take at most the bytes of a bucket or of three of the largest, so that sums run beside W.
  bool has_room();
  // Waits for room. Outlived by this object.
  std::unique_ptr<Wait> room();

  struct Bucket {
    int stage = 0;
    std::vector<Item> items;
    at::Tensor flat;                     // all its gradients, one after another
    std::vector<at::Tensor> parts = {};  // of `flat`, one for each run of numbers with one owner
    std::vector<int> owners = {};        // by part
    int layers_left = 0;                 // in this step
    std::vector<int> layers;

    bool streams() const { return items.front().parameter->streams_grad(); }
    bool by_source() const { return items.front().parameter->share().of > 1; }
  };
  const std::vector<Bucket>& buckets() const { return buckets_; }
  // The number of buckets that this step has started.
  size_t started() const { return next_; }

 private:
  class AllSums;
  class Room;
  // A streamed gradient whose sum has begun.
  struct InSum {
    size_t bucket = 0;
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    int64_t bytes = 0;
  };
  struct Running {
    size_t bucket = 0;
    std::unique_ptr<Wait> sum;
    bool done = false;
  };

  // The buckets whose last gradients have been launched, in order. `all`: also those of which nothing will come.
  void note_made(bool all);
  void start_ready();
  void start_next();
  std::string describe(size_t bucket) const;
  [[noreturn]] void fail_to_sum(size_t bucket, double timeout) const;

  Transport& replicas_;
  Transport* holders_;
  Device device_;
  int64_t bucket_bytes_;
  int64_t largest_ = 0;  // bytes of the largest streamed gradient so far
  std::vector<Bucket> buckets_;
  size_t next_ = 0;               // the first bucket that has not started
  std::deque<DeviceEvent> made_;  // from this bucket on: passes when the bucket's gradients are there
  std::deque<Running> running_;
  std::vector<InSum> in_sums_;      // those whose memory may still be there
  std::vector<Parameter*> summed_;  // streamed
};

}  // namespace twobp
