// Kernels that a set takes from one before it, where both are built: they use no instruction that only the later one has,
// give the same bits, and need not be compiled twice. The build defines HEADRACE_NATURAL_OF and HEADRACE_PAIRED_OF.
#pragma once

#include "isa/simd.h"
#include "kernels.h"

#ifdef HEADRACE_NATURAL_OF
namespace headrace::HEADRACE_NATURAL_OF {
template <typename T> void attend_natural(const Attend &);
template <typename T> void linear_plain(const Linear &);
}  // namespace headrace::HEADRACE_NATURAL_OF
namespace headrace::HEADRACE_NS {
using HEADRACE_NATURAL_OF::attend_natural;
using HEADRACE_NATURAL_OF::linear_plain;
}  // namespace headrace::HEADRACE_NS
#endif

#ifdef HEADRACE_PAIRED_OF
namespace headrace::HEADRACE_PAIRED_OF {
void attend_paired(const Attend &);
}
namespace headrace::HEADRACE_NS {
using HEADRACE_PAIRED_OF::attend_paired;
}
#endif
