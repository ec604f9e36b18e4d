// The stand-in for NCCL as a library with NCCL's names. The program that loads it has the stand-in device.
#include "tests/transport/stand_in_nccl.h"

using twobp::NcclComm;
using twobp::NcclConfig;
using twobp::NcclUniqueId;

namespace {

const twobp::NcclApi& api() {
  static const twobp::NcclApi api = twobp::test::stand_in_nccl();
  return api;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  return api().get_version(version);
}
int ncclGetUniqueId(NcclUniqueId* id) {
  return api().get_unique_id(id);
}
int ncclCommInitRankConfig(NcclComm* comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config) {
  return api().init_rank(comm, ranks, id, rank, config);
}
int ncclCommFinalize(NcclComm comm) {
  return api().finalize(comm);
}
int ncclCommDestroy(NcclComm comm) {
  return api().destroy(comm);
}
int ncclCommAbort(NcclComm comm) {
  return api().abort(comm);
}
int ncclCommGetAsyncError(NcclComm comm, int* error) {
  return api().get_async_error(comm, error);
}
int ncclSend(const void* data, size_t count, int type, int peer, NcclComm comm, void* stream) {
  return api().send(data, count, type, peer, comm, stream);
}
int ncclRecv(void* data, size_t count, int type, int peer, NcclComm comm, void* stream) {
  return api().receive(data, count, type, peer, comm, stream);
}
int ncclGroupStart() {
  return api().group_start();
}
int ncclGroupEnd() {
  return api().group_end();
}
int ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, NcclComm comm, void* stream) {
  return api().all_reduce(from, to, count, type, operation, comm, stream);
}
int ncclReduce(const void* from, void* to, size_t count, int type, int operation, int root, NcclComm comm,
               void* stream) {
  return api().reduce(from, to, count, type, operation, root, comm, stream);
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, NcclComm comm, void* stream) {
  return api().broadcast(from, to, count, type, root, comm, stream);
}
const char* ncclGetErrorString(int error) {
  return api().error_text(error);
}

}  // extern "C"
