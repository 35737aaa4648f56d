// Loops of the kernels, shared out among threads.
#pragma once

#include "common/threads.h"

namespace headrace::HEADRACE_NS {

// f(task) for tasks 0 .. count - 1, each once.
template <typename F> void share_out(int64_t count, int threads, F f, Stretches stretches = Stretches::own) {
  run_tasks({[](void *context, int64_t task) { (*static_cast<F *>(context))(task); }, &f, count}, threads, stretches);
}

// f(first, end) for ranges that make up 0 .. count: several for each thread, so that others can help out.
template <typename F> void share_ranges(int64_t count, int threads, F f) {
  constexpr int64_t EACH = 4;
  const int64_t wanted = threads < 2 ? 1 : EACH * threads, pieces = wanted < count ? wanted : count;
  share_out(pieces, threads, [&](int64_t i) { f(count * i / pieces, count * (i + 1) / pieces); });
}

// f(i) for i = 0 .. count - 1, by such ranges.
template <typename F> void share_each(int64_t count, int threads, F f) {
  share_ranges(count, threads, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) f(i);
  });
}

}  // namespace headrace::HEADRACE_NS
