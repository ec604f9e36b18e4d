// Included before every file that uses 16-bit numbers, when clang is older than version 15. Such a clang has no
// _Float16 without AVX512-FP16. LibTorch's class replaces it.
#pragma once

#include <immintrin.h>

#include <c10/util/Half.h>

#define _Float16 c10::Half
