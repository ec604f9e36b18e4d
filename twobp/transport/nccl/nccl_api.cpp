#include "twobp/transport/nccl/nccl_api.h"

#include <dlfcn.h>

#include "twobp/core/check.h"

namespace twobp {
namespace {

constexpr int kOldestVersion = 21400;  // 10000 * major + 100 * minor + patch

template <typename Function>
void find(void* handle, const std::string& library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  TWOBP_CHECK(function != nullptr, library, " is no NCCL of version 2.14 or newer: it has no ", name);
}

}  // namespace

std::optional<int> nccl_type(at::ScalarType type) {
  switch (type) {
    case at::kLong:
      return 4;
    case at::kHalf:
      return 6;
    case at::kFloat:
      return 7;
    case at::kDouble:
      return 8;
    case at::kBFloat16:
      return 9;
    default:
      return std::nullopt;
  }
}

NcclApi load_nccl(const std::string& library) {
  const std::string name = library.empty() ? "libnccl.so.2" : library;
  // The soname also finds the library that LibTorch has loaded, wherever it is.
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* reason = dlerror();
    fail("NCCL is not available (", reason ? reason : name.c_str(),
         "): install it or add its folder to LD_LIBRARY_PATH, or use pipeline.transport = \"mpi\"");
  }
  NcclApi api;
  find(handle, name, "ncclGetVersion", api.get_version);
  find(handle, name, "ncclGetUniqueId", api.get_unique_id);
  find(handle, name, "ncclCommInitRankConfig", api.init_rank);
  find(handle, name, "ncclCommFinalize", api.finalize);
  find(handle, name, "ncclCommDestroy", api.destroy);
  find(handle, name, "ncclCommAbort", api.abort);
  find(handle, name, "ncclCommGetAsyncError", api.get_async_error);
  find(handle, name, "ncclSend", api.send);
  find(handle, name, "ncclRecv", api.receive);
  find(handle, name, "ncclGroupStart", api.group_start);
  find(handle, name, "ncclGroupEnd", api.group_end);
  find(handle, name, "ncclAllReduce", api.all_reduce);
  find(handle, name, "ncclReduce", api.reduce);
  find(handle, name, "ncclBroadcast", api.broadcast);
  find(handle, name, "ncclGetErrorString", api.error_text);
  int version = 0;
  TWOBP_CHECK(api.get_version(&version) == NcclApi::kSuccess && version >= kOldestVersion, name,
              " says that it is version ", version, ", 21400 (2.14) or newer is needed");
  return api;
}

}  // namespace twobp
