// Kernels that a set takes from one before it, where both are built: they use no instruction that only the later one has,
// give the same bits, and need not be compiled twice. The build defines HEADRACE_PLAIN_OF and HEADRACE_VNNI_OF.
#pragma once

#include "isa/simd.h"
#include "kernels.h"

#ifdef HEADRACE_PLAIN_OF
namespace headrace::HEADRACE_PLAIN_OF {
template <typename T> void attend_plain(const Attend &);
template <typename T> void linear_plain(const Linear &);
}  // namespace headrace::HEADRACE_PLAIN_OF
namespace headrace::HEADRACE_NS {
using HEADRACE_PLAIN_OF::attend_plain;
using HEADRACE_PLAIN_OF::linear_plain;
}  // namespace headrace::HEADRACE_NS
#endif

#ifdef HEADRACE_VNNI_OF
namespace headrace::HEADRACE_VNNI_OF {
void attend_vnni(const Attend &);
}
namespace headrace::HEADRACE_NS {
using HEADRACE_VNNI_OF::attend_vnni;
}
#endif
