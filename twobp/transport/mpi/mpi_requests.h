// Open MPI sends and receives, tested together. Private to the MPI transport.
#pragma once

#include <cstddef>
#include <mpi.h>
#include <vector>

#include "twobp/core/check.h"

namespace twobp {

// Throws Error with MPI's text for `code` unless it is success.
void check_mpi(int code, const char* what);

// A message under way. The memory that its requests read and write must not move until all are done.
struct Transfer {
  virtual ~Transfer() = default;
  int open = 0;  // number of open requests
};

class MpiRequests {
 public:
  // `bytes` is the number of bytes that a receive must deliver, and -1 for a send.
  void add(MPI_Request request, Transfer& transfer, int bytes = -1);
  // Tests the requests and counts the finished ones off their transfers. Appends transfers without open requests to
  // `done`.
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
