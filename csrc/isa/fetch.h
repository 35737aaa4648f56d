// Fetching ahead: cache lines asked for before anybody reads them.
#pragma once

#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

constexpr int LINE_BYTES = 64;

// Where lines go, in the numbers of __builtin_prefetch: to L1 and L2, to L2, or to L1 alone, for what nobody reads twice.
constexpr int TO_L1 = 3, TO_L2 = 2, TO_L1_ALONE = 0;

// LINES cache lines. (To be inlined always: GCC takes a function that only prefetches for one without effect, and drops its
// calls.)
template <int LINES, int WHERE = TO_L1> HEADRACE_INLINE void fetch_lines(const void *from) {
  const char *first = static_cast<const char *>(from);
  if constexpr (LINES <= 8) HEADRACE_EACH(line, LINES, __builtin_prefetch(first + line * LINE_BYTES, 0, WHERE));
  else each<LINES>([&](auto line) HEADRACE_ALWAYS_INLINE { __builtin_prefetch(first + line * LINE_BYTES, 0, WHERE); });
}

constexpr int SOME = -1;  // a number of lines that is not known when this is compiled

// `lines` lines, rounded up to 0, 1, 2 or 4: for tiles of many rows, which have the time to ask how many.
HEADRACE_INLINE void fetch_some(const void *from, int lines, bool to_l2) {
  if (lines == 0) return;
  const char *first = static_cast<const char *>(from);
  if (to_l2) {
    fetch_lines<1, TO_L2>(first);
    if (lines > 1) fetch_lines<1, TO_L2>(first + LINE_BYTES);
    if (lines > 2) fetch_lines<2, TO_L2>(first + 2 * LINE_BYTES);
  } else {
    fetch_lines<1>(first);
    if (lines > 1) fetch_lines<1>(first + LINE_BYTES);
    if (lines > 2) fetch_lines<2>(first + 2 * LINE_BYTES);
  }
}

// The same to where there is room for what is read next.
template <int LINES> HEADRACE_INLINE void fetch_near(const void *from, int lines = LINES) {
  if constexpr (LINES == SOME) fetch_some(from, lines, small_l1);
  else small_l1 ? fetch_lines<LINES, TO_L2>(from) : fetch_lines<LINES>(from);
}

}  // namespace headrace::HEADRACE_NS
