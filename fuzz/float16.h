// Compiled in front of every file that knows numbers of 16 bits by a clang that is older than 15, which has
// no _Float16 without AVX512-FP16: LibTorch's class stands in for it.
#pragma once

#include <immintrin.h>

#include <c10/util/Half.h>

#define _Float16 c10::Half
