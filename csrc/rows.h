// Products of a few fp32 rows with a matrix that is read step by step: sums[R][C W] += x[R][i] * w[i][C W], one chain of
// multiply-adds over ascending i for each sum, whatever R and C: the work of processors that do not multiply bf16.
#pragma once

#include "fetch.h"

namespace headrace::HEADRACE_NS {

// What is read later and fetched meanwhile: `stride` bytes in each step. Where it is nothing, some line that is there.
struct Coming {
  const char *from;
  int64_t stride;
};

// C vectors of W numbers each, by two as load_two gives them; a single one lies in order.
template <int C, typename S> HEADRACE_INLINE void load_columns(const S *from, vf (&x)[C]) {
  static_assert(C == 1 || C % 2 == 0);
  if constexpr (C == 1)
    x[0] = load(from);
  else
    each<C / 2>([&](auto c) HEADRACE_ALWAYS_INLINE { load_two(from + 2 * c * W, x[2 * c], x[2 * c + 1]); });
}

// Sums of vectors that load_columns made of numbers of type S, as those lie in memory.
template <typename S, int C> HEADRACE_INLINE void order_columns(vf (&x)[C]) {
  if constexpr (C > 1)
    each<C / 2>([&](auto c) HEADRACE_ALWAYS_INLINE {
      in_order(static_cast<const S *>(nullptr), x[2 * c], x[2 * c + 1]);
    });
}

template <int R, int C> HEADRACE_INLINE void zero(vf (&sum)[R][C]) {
  each<R * C>([&](auto i) HEADRACE_ALWAYS_INLINE { sum[i / C][i % C] = vf{}; });
}

// f(first row, Constant<count>) for `rows` rows, as many at once as there are among the counts, which descend to 1.
template <int COUNT, int... OTHERS, typename F> HEADRACE_INLINE void by_rows(int rows, F f, int first = 0) {
  for (; rows - first >= COUNT; first += COUNT) f(first, Constant<COUNT>{});
  if constexpr (sizeof...(OTHERS) > 0) by_rows<OTHERS...>(rows, f, first);
}

// Vectors of w to load at once beside R rows of C sums, an input and a mask: all of them, or two if there are not registers
// for so many. A sum that is kept in memory costs its way there and back in each step.
constexpr int at_once(int rows, int columns) {
  return columns < 2 || rows * columns + columns + 2 <= REGISTERS ? columns : 2;
}

// One step: x[R][i] times the vectors of w that load(i, i % 2, column, weight) gives from a column on.
template <int R, int C, typename Load, typename Odd>
HEADRACE_INLINE void add_step(const float *x, int64_t x_stride, int64_t i, Odd odd, Load load, vf (&sum)[R][C]) {
  constexpr int N = at_once(R, C);
  each<C / N>([&](auto part) HEADRACE_ALWAYS_INLINE {
    vf weight[N];
    load(i, odd, part * N * W, weight);
    each<R>([&](auto r) HEADRACE_ALWAYS_INLINE {
      const vf input = splat(x[r * x_stride + i]);
      each<N>([&](auto c) HEADRACE_ALWAYS_INLINE {
        sum[r][part * N + c] = madd(input, weight[c], sum[r][part * N + c]);
      });
    });
  });
}

// Steps begin .. end - 1, STEPS at a time, of which both are multiples: with two, `load` knows i % 2 when it is compiled.
// BYTES are fetched for each step, to L1 if NEAR, else to L2.
template <int STEPS, int BYTES, bool NEAR, int R, int C, typename Load>
HEADRACE_INLINE void add_products(const float *x, int64_t x_stride, int64_t begin, int64_t end, Load load, Coming next,
                                  vf (&sum)[R][C]) {
  constexpr int LINES = (STEPS * BYTES + 63) / 64;
  for (int64_t i = begin; i < end; i += STEPS, next.from += STEPS * next.stride) {
    fetch_lines<LINES, NEAR ? TO_L1 : TO_L2>(next.from);
    if constexpr (STEPS == 1)
      add_step(x, x_stride, i, static_cast<int>(i & 1), load, sum);
    else
      each<STEPS>([&](auto part) HEADRACE_ALWAYS_INLINE { add_step(x, x_stride, i + part, part, load, sum); });
  }
}

}  // namespace headrace::HEADRACE_NS
