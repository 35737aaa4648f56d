// Fetching ahead: cache lines asked for before anybody reads them.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_NS {

constexpr int LINE_BYTES = 64;

// Where lines go, in the numbers of __builtin_prefetch: to L1 and L2, to L2, or to L1 alone, for what nobody reads twice.
constexpr int TO_L1 = 3, TO_L2 = 2, TO_L1_ALONE = 0;

// LINES cache lines. (To be inlined always: GCC takes a function that only prefetches for one without effect, and drops its
// calls.)
template <int LINES, int WHERE = TO_L1> HEADRACE_INLINE void fetch_lines(const void *from) {
  each<LINES>([&](auto line) HEADRACE_ALWAYS_INLINE {
    __builtin_prefetch(static_cast<const char *>(from) + line * LINE_BYTES, 0, WHERE);
  });
}

// The same to where there is room for what is read next.
template <int LINES> HEADRACE_INLINE void fetch_near(const void *from) {
  small_l1 ? fetch_lines<LINES, TO_L2>(from) : fetch_lines<LINES>(from);
}

}  // namespace headrace::HEADRACE_NS
