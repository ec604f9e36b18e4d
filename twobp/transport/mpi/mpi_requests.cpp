#include "twobp/transport/mpi/mpi_requests.h"

#include <string>

namespace twobp {

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail("MPI failed to ", what, ": ", std::string(text, length));
}

void MpiRequests::add(MPI_Request request, Transfer& transfer, int bytes) {
  requests_.push_back(request);
  about_.push_back({&transfer, bytes});
  ++transfer.open;
}

void MpiRequests::test(std::vector<Transfer*>& done) {
  if (requests_.empty()) return;
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int count = 0;
  const int code =
      MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, indices_.data(), statuses_.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (int i = 0; i < count; ++i) check_mpi(statuses_[i].MPI_ERROR, "move a message");
  }
  check_mpi(code, "move a message");
  if (count == MPI_UNDEFINED || count == 0) return;
  for (int i = 0; i < count; ++i) {
    const About& about = about_[indices_[i]];
    if (about.bytes >= 0) {
      int bytes = 0;
      check_mpi(MPI_Get_count(&statuses_[i], MPI_BYTE, &bytes), "count what it received");
      TWOBP_CHECK(bytes == about.bytes, "rank ", statuses_[i].MPI_SOURCE, " sent ", bytes,
                  " bytes of a tensor, but had announced ", about.bytes);
    }
    if (--about.transfer->open == 0) done.push_back(about.transfer);
  }
  size_t kept = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    requests_[kept] = requests_[i];
    about_[kept++] = about_[i];
  }
  requests_.resize(kept);
  about_.resize(kept);
}

}  // namespace twobp
