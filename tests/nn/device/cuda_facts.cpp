// Compile-time checks of the properties of LibTorch's CUDA half on which devices and NCCL links rely. They need the
// toolkit's headers, but no GPU and no CUDA library. This file is not linked into anything.
#include <type_traits>

#include <c10/cuda/impl/CUDAGuardImpl.h>
#if __has_include(<cusparse.h>) && __has_include(<cublasLt.h>) && __has_include(<cusolverDn.h>)
#include <torch/csrc/cuda/nccl.h>
#define TWOBP_HAS_NCCL_HEADER 1
#endif

#include "twobp/transport/nccl/nccl_api.h"

namespace twobp::TWOBP_FILE {
namespace {

// True if the backend overrides the function. A pointer to an inherited function has the type of the base class.
template <typename T>
struct ClassOf;
template <typename Function, typename Class>
struct ClassOf<Function Class::*> {
  using type = Class;
};
#define TWOBP_HAS_OWN(function)                                                                    \
  static_assert(std::is_same_v<ClassOf<decltype(&c10::cuda::impl::CUDAGuardImpl::function)>::type, \
                               c10::cuda::impl::CUDAGuardImpl>)

TWOBP_HAS_OWN(getStreamFromGlobalPool);
TWOBP_HAS_OWN(getStreamNativeHandle);
TWOBP_HAS_OWN(record);
TWOBP_HAS_OWN(block);
TWOBP_HAS_OWN(queryEvent);
TWOBP_HAS_OWN(synchronizeEvent);
TWOBP_HAS_OWN(queryStream);
TWOBP_HAS_OWN(synchronizeStream);
TWOBP_HAS_OWN(recordDataPtrOnStream);
TWOBP_HAS_OWN(deviceCount);

static_assert(sizeof(NcclUniqueId) == 128 && std::is_trivially_copyable_v<NcclUniqueId>);
static_assert(offsetof(NcclConfig, magic) == 8 && offsetof(NcclConfig, version) == 12 &&
              offsetof(NcclConfig, blocking) == 16);
#ifdef TWOBP_HAS_NCCL_HEADER
namespace torch_nccl = torch::cuda::nccl;
static_assert(sizeof(NcclUniqueId) == sizeof(torch_nccl::ncclUniqueId));
static_assert(NcclApi::kSuccess == static_cast<int>(torch_nccl::ncclResult::Success));
static_assert(NcclApi::kInProgress == static_cast<int>(torch_nccl::ncclResult::InProgress));
static_assert(NcclApi::kByte == static_cast<int>(torch_nccl::ncclDataType::Uint8));
#endif

}  // namespace
}  // namespace twobp::TWOBP_FILE
