// The part of NCCL's C interface that we use. It is loaded from the library at run time, so building needs nothing of
// NCCL. Constants are those of nccl.h, stable since NCCL 2.14.
#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <string>

#include <ATen/ATen.h>

namespace twobp {

struct NcclUniqueId {
  char bytes[128];
};

using NcclComm = void*;  // ncclComm_t

// ncclConfig_t as of 2.17. A newer library takes the fields that it adds as undefined. An older one reads no further
// than it knows, so it ignores all fields after `blocking`.
struct NcclConfig {
  static constexpr int kUndefined = std::numeric_limits<int>::min();  // the library decides

  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21700;
  int blocking = 0;  // calls return before they are done, so that a wait for a peer can time out
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;  // blocks of threads: each occupies a multiprocessor
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
};
static_assert(sizeof(NcclConfig) == 40);

struct NcclApi {
  static constexpr int kSuccess = 0;
  static constexpr int kInProgress = 7;
  static constexpr int kByte = 1;  // ncclUint8
  static constexpr int kSum = 0;   // of ncclRedOp_t

  int (*get_version)(int* version) = nullptr;
  int (*get_unique_id)(NcclUniqueId* id) = nullptr;
  int (*init_rank)(NcclComm* comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config) = nullptr;
  int (*finalize)(NcclComm comm) = nullptr;
  int (*destroy)(NcclComm comm) = nullptr;
  int (*abort)(NcclComm comm) = nullptr;
  int (*get_async_error)(NcclComm comm, int* error) = nullptr;
  int (*send)(const void* data, size_t count, int type, int peer, NcclComm comm, void* stream) = nullptr;
  int (*receive)(void* data, size_t count, int type, int peer, NcclComm comm, void* stream) = nullptr;
  // Calls of one communicator between these two are one launch.
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*all_reduce)(const void* from, void* to, size_t count, int type, int operation, NcclComm comm,
                    void* stream) = nullptr;
  int (*reduce)(const void* from, void* to, size_t count, int type, int operation, int root, NcclComm comm,
                void* stream) = nullptr;
  int (*broadcast)(const void* from, void* to, size_t count, int type, int root, NcclComm comm, void* stream) = nullptr;
  const char* (*error_text)(int error) = nullptr;
};

// ncclDataType_t of a dtype whose numbers NCCL can add, or nothing.
std::optional<int> nccl_type(at::ScalarType type);

// Loads the library of this name. If it is empty, loads LibTorch's own, or libnccl.so.2 where the system's loader finds
// it. The library stays loaded. Throws Error if it does not exist, is not NCCL or is older than 2.14.
NcclApi load_nccl(const std::string& library = "");

}  // namespace twobp
