// The stand-in's memory.
#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace twobp::test {

c10::Allocator& stand_in_memory();

// The host may read and write at this address what lies at `data`, also after it was freed. `data` lies
// within a block.
std::byte* address_on_host(const void* data);

// Whether this host tensor lies in the memory from which the stand-in copies without a wait of the host.
bool is_pinned(const at::Tensor& tensor);

// The block may be reused only when what is in the stream at the time of its release is done.
void used_in(const void* data, const c10::Stream& stream);

}  // namespace twobp::test
