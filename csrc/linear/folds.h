// What becomes of the products of runs of inputs (passes.h): their scales and offsets, widened some inputs at a time.
#pragma once

#include "linear/passes.h"
#include "linear/scales.h"

namespace headrace::HEADRACE_NS {

constexpr int64_t LEAST_RUN = 16;
constexpr int64_t SCALES = BLOCK_INPUTS / LEAST_RUN * COLUMNS;

// Of blocks of 64 outputs from one on, for rows from `first` on.
class Folds {
 public:
  Folds(const LinearQuant &a, const float *x_sums, int64_t block, int64_t first, Scratch &memory)
      : a(a), x_sums(x_sums), block(block), first(first), memory(memory.take<float>(4 * SCALES)) {}

  // Of the runs of `most` inputs, or as many as are left, from k on, of the block `ahead` blocks on; good until the next call
  // but one.
  Folding at(int64_t k, int64_t ahead = 0, int64_t most = BLOCK_INPUTS) {
    const int64_t run = a.scaling.run, inputs = a.inputs - k < most ? a.inputs - k : most;
    float *scales = memory + 2 * SCALES * turn, *offsets = scales + SCALES;
    turn ^= 1;
    BlockScales(a.scaling, a.scales, a.inputs, block + ahead).widen(k, divided(inputs, run), scales, offsets);
    if (!x_sums) return {scales};
    const int64_t runs = divided(a.inputs, run);
    return {scales, offsets, x_sums + first * runs + divided(k, run), runs};
  }

  static constexpr int64_t SCRATCH = room<float>(4 * SCALES);  // bytes

 private:
  const LinearQuant &a;
  const float *x_sums;
  int64_t block, first;
  float *memory;
  int turn = 0;
};

// to [rows, 64], its first WIDTH columns: as `fold` and the RUNS - 1 after it have the products [RUNS][rows][WIDTH].
template <int RUNS, int WIDTH, bool OFFSETS>
HEADRACE_APART void fold_rows_of(const float *products, Folding fold, int64_t rows, float *to) {
  constexpr int C = WIDTH / W;
  vf scale[RUNS][C], offset[RUNS][C];
  const float *x_sums = fold.x_sums;
  HEADRACE_EACH(i, RUNS, {
    HEADRACE_EACH(c, C, {
      scale[i][c] = load(fold.scales + c * W);
      if (OFFSETS) offset[i][c] = load(fold.offsets + c * W);
    });
    fold = fold.next();
  });
  for (int64_t row = 0; row < rows; ++row, to += COLUMNS, x_sums += fold.x_sums_stride)
    HEADRACE_EACH(c, C, {
      vf sum = load(to + c * W);
      HEADRACE_EACH(i, RUNS, {
        sum = madd(load(products + (i * rows + row) * WIDTH + c * W), scale[i][c], sum);
        if (OFFSETS) sum = madd(splat(x_sums[i]), offset[i][c], sum);
      });
      store(to + c * W, sum);
    });
}

template <int RUNS, int WIDTH>
HEADRACE_INLINE void fold_rows(const float *products, const Folding &fold, int64_t rows, float *to) {
  fold.offsets ? fold_rows_of<RUNS, WIDTH, true>(products, fold, rows, to)
               : fold_rows_of<RUNS, WIDTH, false>(products, fold, rows, to);
}

}  // namespace headrace::HEADRACE_NS
