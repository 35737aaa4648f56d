// What products with packed weights have in common: how work is shared out, and how sums become results.
#pragma once

#include "arena.h"
#include "kernels.h"
#include "shares.h"
#include "simd.h"

namespace headrace::HEADRACE_NS {

constexpr int64_t COLUMNS = 64;  // outputs in a packed block

// One block of outputs from its sums [last - first, 64], plus the bias.
template <typename T, typename Out>
void write(const Linear &a, int64_t column, int64_t first, int64_t last, const float *sums) {
  const int64_t count = a.outputs - column < COLUMNS ? a.outputs - column : COLUMNS;
  const T *bias = static_cast<const T *>(a.bias);
  for (int64_t row = first; row < last; ++row, sums += COLUMNS) {
    Out *out = static_cast<Out *>(a.out) + row * a.outputs + column;
    for (int64_t c = 0; c < count; c += W) {
      const int64_t n = count - c < W ? count - c : W;
      vf y = load(sums + c);
      if (bias) y = y + (n == W ? load(bias + column + c) : load_part(bias + column + c, n));
      n == W ? store(out + c, y) : store_part(out + c, y, n);
    }
  }
}

// multiply(weights of a block, first row, last row, sums, scratch) for each block of outputs and each `most` rows.
// scratch: floats for multiply's own use, behind the sums.
template <typename T, typename F> void each_block(const Linear &a, int64_t most, int64_t scratch, F multiply) {
  const int64_t blocks = (a.outputs + COLUMNS - 1) / COLUMNS, ranges = (a.rows + most - 1) / most;
  share_out(blocks * ranges, a.threads, [&](int64_t i) {
    const int64_t block = i % blocks, first = i / blocks * most;
    const int64_t last = first + most < a.rows ? first + most : a.rows;
    float *sums = arena(most * COLUMNS + scratch);
    multiply(static_cast<const T *>(a.w) + block * a.inputs * COLUMNS, first, last, sums, sums + most * COLUMNS);
    a.wide ? write<T, float>(a, block * COLUMNS, first, last, sums) : write<T, T>(a, block * COLUMNS, first, last, sums);
  });
}

}  // namespace headrace::HEADRACE_NS
