// MPI sends and receives under way, tested together. Private to the MPI transport.
#pragma once

#include <cstddef>
#include <mpi.h>
#include <vector>

#include "twobp/core/check.h"

namespace twobp {

// Throws Error with MPI's own words for `code` unless it is success.
void check_mpi(int code, const char* what);

// A message under way. What its requests read and write stays where it is until all are done.
struct Transfer {
  virtual ~Transfer() = default;
  int open = 0;  // requests
};

class MpiRequests {
 public:
  // `bytes`: what a receive must bring; -1: of a send.
  void add(MPI_Request request, Transfer& transfer, int bytes = -1);
  // Looks which are done and counts them off their transfers; `done` gets those that have no more.
  void test(std::vector<Transfer*>& done);
  bool empty() const { return requests_.empty(); }

 private:
  struct About {
    Transfer* transfer;
    int bytes;
  };

  std::vector<MPI_Request> requests_;
  std::vector<About> about_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
};

}  // namespace twobp
