// Makes the world of a process from the endpoints of its ranks among all ranks of the run.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "twobp/transport/world.h"

namespace twobp {

// Throws Error unless `processes` equals replicas x ranks.
void check_processes(int processes, int replicas, int ranks);

// The endpoints of one process's ranks. They wait for each other when they are made and when they are destroyed, so
// each of them does that on a thread of its own.
class Ends {
 public:
  // make(i) for each i < count. Rethrows the first error that is not an abort.
  Ends(int count, const std::function<std::shared_ptr<Transport>(int i)>& make);
  ~Ends();
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;

  int size() const { return static_cast<int>(ends_.size()); }
  const std::shared_ptr<Transport>& operator[](int i) const { return ends_[i]; }

 private:
  std::vector<std::shared_ptr<Transport>> ends_;
};

// Endpoint e of the run is rank e % ranks of replica e / ranks. `ends` are those of this process, which come one after
// the other and belong to one replica; every process has as many. Throws Error if the run has another number of ranks.
World make_process_world(std::shared_ptr<Ends> ends, int replicas, int ranks);
// A process of one rank.
World make_process_world(std::shared_ptr<Transport> end, int replicas, int ranks);

}  // namespace twobp
