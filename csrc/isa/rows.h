// Products of a few fp32 rows with a matrix that is read step by step: sums[R][C W] += x[R][i] * w[i][C W], one chain of
// multiply-adds over ascending i for each sum, whatever R and C: the work of processors that do not multiply bf16.
#pragma once

#include "isa/fetch.h"

namespace headrace::HEADRACE_NS {

// What is read later and fetched meanwhile: `stride` bytes in each step. Where it is nothing, some line that is there.
struct Coming {
  const char *from;
  int64_t stride;
};

// C vectors of W numbers each, by two as load_two gives them; a single one lies in order.
template <int C, typename S> HEADRACE_INLINE void load_columns(const S *from, vf (&x)[C]) {
  static_assert(C == 1 || C % 2 == 0);
  if constexpr (C == 1) x[0] = load(from);
  else HEADRACE_EACH(c, C / 2, load_two(from + 2 * c * W, x[2 * c], x[2 * c + 1]));
}

// Sums of vectors that load_columns made of numbers of type S, as those lie in memory.
template <typename S, int C> HEADRACE_INLINE void order_columns(vf (&x)[C]) {
  if constexpr (C > 1) HEADRACE_EACH(c, C / 2, { in_order(static_cast<const S *>(nullptr), x[2 * c], x[2 * c + 1]); });
}

template <int R, int C> HEADRACE_INLINE void zero(vf (&sum)[R][C]) {
  HEADRACE_EACH(r, R, HEADRACE_EACH(c, C, sum[r][c] = vf{}));
}

// f(first row, Constant<count>) for `rows` rows, as many at once as there are among the counts, which descend to 1.
template <int COUNT, int... OTHERS, typename F> HEADRACE_INLINE void by_rows(int rows, F f, int first = 0) {
  for (; rows - first >= COUNT; first += COUNT) f(first, Constant<COUNT>{});
  if constexpr (sizeof...(OTHERS) > 0) by_rows<OTHERS...>(rows, f, first);
}

// Vectors of w to load at once beside R rows of C sums, an input and a mask: all of them, or two if there are not registers
// for so many. A sum that is kept in memory costs its way there and back in each step.
constexpr int at_once(int rows, int columns) { return columns < 2 || rows * columns + columns + 2 <= REGISTERS ? columns : 2; }

// One step: x[R][i] times the vectors of w that load(i, i % 2, column, weight) gives from a column on.
template <int R, int C, typename Load, typename Odd>
HEADRACE_INLINE void add_step(const float *x, int64_t x_stride, int64_t i, Odd odd, Load load, vf (&sum)[R][C]) {
  constexpr int N = at_once(R, C);
  HEADRACE_EACH(part, C / N, {
    vf weight[N];
    load(i, odd, part * N * W, weight);
    HEADRACE_EACH(r, R, {
      const vf input = splat(x[r * x_stride + i]);
      HEADRACE_EACH(c, N, { sum[r][part * N + c] = madd(input, weight[c], sum[r][part * N + c]); });
    });
  });
}

// Steps begin .. end - 1, STEPS at a time, of which both are multiples: with two, `load` knows i % 2 when it is compiled.
// BYTES are fetched for each step, to L1 if `near`, else to L2.
template <int STEPS, int BYTES, int R, int C, typename Load>
HEADRACE_INLINE void add_products(const float *x, int64_t x_stride, int64_t begin, int64_t end, Load load, Coming next,
                                  bool near, vf (&sum)[R][C]) {
  constexpr int LINES = (STEPS * BYTES + 63) / 64;
  for (int64_t i = begin; i < end; i += STEPS, next.from += STEPS * next.stride) {
    near ? fetch_lines<LINES, TO_L1>(next.from) : fetch_lines<LINES, TO_L2>(next.from);
    if constexpr (STEPS == 1) add_step(x, x_stride, i, static_cast<int>(i & 1), load, sum);
    else HEADRACE_EACH(part, STEPS, add_step(x, x_stride, i + part, Constant<part>{}, load, sum));
  }
}

}  // namespace headrace::HEADRACE_NS
