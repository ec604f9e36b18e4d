// The stand-in's memory.
#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace twobp::test {

c10::Allocator& stand_in_memory();

// The address at which the host may read and write the memory at `data`, which lies within a block. It stays valid
// after the block was freed.
std::byte* address_on_host(const void* data);

// Whether this host tensor lies in the memory from which the stand-in copies without a wait of the host.
bool is_pinned(const at::Tensor& tensor);

// The block may be reused only when all work is done that is in the stream at the time of its release.
void used_in(const void* data, const c10::Stream& stream);

}  // namespace twobp::test
