// Kernels come in families (Kernels, EncoderKernels, ...). Each family is a struct of function pointers for a stored
// type. A family's source is compiled once per instruction set, into a table in that set's namespace. The best table
// that this CPU can run is selected at run time.
#pragma once

#include <type_traits>

#include "twobp/nn/kernels/number.h"

namespace twobp {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };
// Whether this CPU supports the instruction set.
bool supports(InstructionSet set);
bool is_amd();
// The best instruction set of this CPU: "avx512", "avx2" or "baseline".
const char* kernel_instruction_set();

// A family's kernels for every stored type.
template <template <typename...> class Family>
struct KernelTable {
  Family<float> of_float;
  Family<double> of_double;
  Family<BFloat16> of_bfloat16;
  Family<Half> of_half;

  template <typename S>
  const Family<S>& of() const {
    if constexpr (std::is_same_v<S, float>) {
      return of_float;
    } else if constexpr (std::is_same_v<S, double>) {
      return of_double;
    } else if constexpr (std::is_same_v<S, BFloat16>) {
      return of_bfloat16;
    } else {
      static_assert(std::is_same_v<S, Half>);
      return of_half;
    }
  }
};

// A table for each instruction set.
template <template <typename...> class Family>
struct KernelTables {
  const KernelTable<Family>& baseline;
  const KernelTable<Family>& avx2;
  const KernelTable<Family>& avx512;

  const KernelTable<Family>& best() const {
    if (supports(InstructionSet::kAvx512)) return avx512;
    return supports(InstructionSet::kAvx2) ? avx2 : baseline;
  }
};

// For a family's header: declares the tables and gathers them as `NAME_tables()`.
#if defined(__x86_64__)
#define TWOBP_KERNEL_FAMILY(Family, name)                                      \
  namespace baseline {                                                         \
  extern const KernelTable<Family> name##_table;                               \
  }                                                                            \
  namespace avx2 {                                                             \
  extern const KernelTable<Family> name##_table;                               \
  }                                                                            \
  namespace avx512 {                                                           \
  extern const KernelTable<Family> name##_table;                               \
  }                                                                            \
  inline KernelTables<Family> name##_tables() {                                \
    return {baseline::name##_table, avx2::name##_table, avx512::name##_table}; \
  }
#else
#define TWOBP_KERNEL_FAMILY(Family, name)                                            \
  namespace baseline {                                                               \
  extern const KernelTable<Family> name##_table;                                     \
  }                                                                                  \
  inline KernelTables<Family> name##_tables() {                                      \
    return {baseline::name##_table, baseline::name##_table, baseline::name##_table}; \
  }
#endif

}  // namespace twobp
