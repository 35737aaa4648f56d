// Tasks shared out among threads so that each goes through a stretch of its own in order, as the memory behind it lies, and
// then takes the last ones of whoever has some left: a core that is slowed down holds up nobody.
#pragma once

#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace headrace::HEADRACE_NS {

constexpr int MOST_SHARES = 256;  // of threads; more would find nothing to do

// What is left of a thread's stretch: its first task, and above it in the upper half the one behind its last.
struct alignas(64) Stretch {
  uint64_t left;

  // The first task, or the last; -1: there is none.
  int64_t take(bool last) {
    uint64_t now = __atomic_load_n(&left, __ATOMIC_RELAXED);
    for (;;) {
      const uint32_t first = static_cast<uint32_t>(now), end = static_cast<uint32_t>(now >> 32);
      if (first == end) return -1;
      const uint64_t rest = last ? now - (1ull << 32) : now + 1;
      if (__atomic_compare_exchange_n(&left, &now, rest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return last ? end - 1 : first;
    }
  }
};

// f(task) for tasks 0 .. count - 1, each once.
template <typename F> void share_out(int64_t count, int threads, F f) {
  const int64_t shares = threads < MOST_SHARES ? threads : MOST_SHARES;
  Stretch all[MOST_SHARES];
  for (int64_t i = 0; i < shares; ++i)
    all[i].left = static_cast<uint64_t>(count * i / shares) | static_cast<uint64_t>(count * (i + 1) / shares) << 32;
#pragma omp parallel num_threads(static_cast<int>(shares)) if (count > 1 && shares > 1)
  {
#ifdef _OPENMP
    const int64_t me = omp_get_thread_num();
#else
    const int64_t me = 0;
#endif
    for (int64_t task; (task = all[me].take(false)) >= 0;) f(task);
    for (int64_t other = me + 1; other < me + shares; ++other)
      for (int64_t task; (task = all[other % shares].take(true)) >= 0;) f(task);
  }
}

}  // namespace headrace::HEADRACE_NS
