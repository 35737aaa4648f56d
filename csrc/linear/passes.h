// Rows of x passing by a block of weights of 64 outputs and up to 64 inputs: sums[rows][64] += x[rows][inputs] . w, in fp32,
// one chain of multiply-adds over ascending inputs for each sum. For processors that do not multiply bf16, and for fp32.
//
// What weights are is a policy: how many INPUTS a block has; BYTES of an input's 64 weights, where one input's lie behind the
// other's; Same, the type in whose order (load_two) two vectors come; STORED_ROWS, how many rows read them as they lie, where more
// read a copy in fp32; memory(), where they begin; load(input, whether it is odd, column, vectors), which costs less if inputs go
// by STEPS; LANES, whether few rows and copies are better off with each_number(input, half, f), which takes two inputs of 32
// outputs at once and gives f(v, whether the input is odd, numbers), vector v beginning at column(half, v): codes on AVX2
// (byte_lanes.h).
#pragma once

#include "isa/rows.h"
#include "linear/linear.h"

namespace headrace::HEADRACE_NS {

constexpr int64_t PASS_INPUTS = 64;    // of a block: 16 KB of fp32 weights, two of which fit into L1; of bf16 twice as many
constexpr int64_t BLOCK_INPUTS = 256;  // whose scales are widened together
constexpr int ANY_ROWS = 1 << 30;
constexpr int PASS_ROWS = 6;  // of a tile: with four (AVX-512) or two vectors side by side they fill the registers
constexpr int LANE_ROWS = 4;  // of one that takes codes by lanes
constexpr bool BY_LANES = W == 8;
constexpr int OUTPUTS = COLUMNS;  // an int: divisions of 64 bits take long

// Weights [inputs][64] of type S.
template <typename S> struct PlainWeights {
  static constexpr int BYTES = OUTPUTS * sizeof(S), STEPS = 1, INPUTS = PASS_INPUTS * sizeof(float) / sizeof(S);
  static constexpr int STORED_ROWS = W == 8 || sizeof(S) == sizeof(float) ? ANY_ROWS : PASS_ROWS;
  static constexpr bool LANES = false;
  using Same = S;
  const S *w;

  const char *memory() const { return reinterpret_cast<const char *>(w); }

  template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int, int64_t column, vf (&x)[C]) const {
    load_columns(w + input * OUTPUTS + column, x);
  }
};

// Vectors of sums side by side: few rows need more of them, so that enough chains are under way.
constexpr int pass_width(int rows) { return W == 16 ? 4 : rows == 1 ? 8 : rows == 2 ? 4 : 2; }

// What becomes of a block's products of 64 outputs: multiplied by scales [64], and the sum of each row's inputs (x_sums,
// x_sums_stride apart) times offsets [64] added. Either may be null.
struct Folding {
  const float *scales = nullptr, *offsets = nullptr, *x_sums = nullptr;
  int64_t x_sums_stride = 0;

  Folding from(int64_t row) const { return {scales, offsets, x_sums + row * x_sums_stride, x_sums_stride}; }

  // Of the runs after it the n-th.
  Folding next(int64_t n = 1) const {
    if (!offsets) return {scales + n * COLUMNS};
    return {scales + n * COLUMNS, offsets + n * COLUMNS, x_sums + n, x_sums_stride};
  }

  // Of the outputs from `column` on.
  Folding beside(int64_t column) const {
    return {scales + column, offsets ? offsets + column : nullptr, x_sums, x_sums_stride};
  }

  // W outputs from `column` on of a row: what is in memory and its products.
  HEADRACE_ALWAYS_INLINE vf folded(vf products, vf before, int64_t row, int64_t column) const {
    const vf sum = madd(products, load(scales + column), before);
    return offsets ? madd(splat(x_sums[row * x_sums_stride]), load(offsets + column), sum) : sum;
  }
};

// The sums of R rows and C W outputs: of `inputs` inputs in runs, each folded.
template <int R, int C, int FETCHED, typename Block>
HEADRACE_APART void pass_tile(const float *x, int64_t x_stride, const Block &w, int64_t inputs, int64_t run, int64_t column,
                              Folding fold, float *sums, Coming next) {
  if constexpr (C * W == OUTPUTS) column = 0;  // so that compilers know it
  const auto weights = [&](int64_t i, auto odd, int at, auto &weight)
                           HEADRACE_ALWAYS_INLINE { w.load(i, odd, column + at, weight); };
  constexpr int STEPS = R * C + at_once(R, C) + 2 < REGISTERS ? Block::STEPS : 1;  // GCC loads too early if none is left
  const bool folds = fold.scales;
  for (int64_t begin = 0; begin < inputs; begin += run, next.from += run * next.stride) {
    vf sum[R][C];
    HEADRACE_EACH(r, R, { HEADRACE_EACH(c, C, sum[r][c] = folds ? vf{} : load(sums + r * OUTPUTS + column + c * W)); });
    add_products<STEPS, FETCHED * C * W / OUTPUTS>(x, x_stride, begin, begin + run, weights, next, true, sum);
    HEADRACE_EACH(r, R, {
      HEADRACE_EACH(c, C, {
        float *to = sums + r * OUTPUTS + column + c * W;
        store(to, folds ? fold.folded(sum[r][c], load(to), r, column + c * W) : sum[r][c]);
      });
    });
    if (folds) fold = fold.next();
  }
}

struct Rows {
  const float *x;
  int64_t stride;
};

inline Rows fp32_rows(const float *x, int64_t stride, int64_t, int64_t, float *) { return {x, stride}; }

inline Rows fp32_rows(const bf16 *x, int64_t stride, int64_t rows, int64_t inputs, float *to) {
  for (int64_t row = 0; row < rows; ++row) widen(x + row * stride, to + row * inputs, inputs);
  return {to, inputs};
}

constexpr int64_t FEW_ROWS = 16, MOST_WIDENED = 16 << 20;  // floats

static inline float *memory_for_rows(int64_t floats) {
  static thread_local Arena mine;
  return mine.at_least(room<float>(floats)).take<float>(floats);
}

// f(x, x_stride): x [R, K] in fp32, or as it is where few rows, or so many that their copy took much memory, are widened
// for 64 outputs at a time.
template <typename T, typename Any, typename F> void with_rows(const Any &a, F f) {
  const T *x = static_cast<const T *>(a.x);
  const int64_t stride = (a.inputs + 31) / 16 * 16;  // no power of two: rows would share the same few places in L1
  if (sizeof(T) == sizeof(float) || a.rows <= FEW_ROWS || a.rows * stride > MOST_WIDENED) return f(x, a.x_stride);
  float *wide = memory_for_rows(a.rows * stride);
  share_each(a.rows, a.threads, [&](int64_t row) { widen(x + row * a.x_stride, wide + row * stride, a.inputs); });
  f(static_cast<const float *>(wide), stride);
}

// All rows, each group of them fetching its share of the block of BYTES for each input that comes next: in a step of all its
// tiles FETCHED bytes at most.
template <int BYTES, int FETCHED, typename Block>
void pass(int rows, Rows x, const Block &w, int inputs, int run, const Folding &fold, float *sums, const char *next) {
  by_rows<6, 5, 4, 3, 2, 1>(rows, [&](int row, auto count) {
    constexpr int C = pass_width(count);
    for (int column = 0; column < OUTPUTS; column += C * W) {
      const int before = row * OUTPUTS + count * column, all = rows * OUTPUTS;
      const Coming share = {next + inputs * BYTES * before / all, BYTES * count * C * W / all};
      pass_tile<count, C, FETCHED>(x.x + row * x.stride, x.stride, w, inputs, run, column, fold.from(row), sums + row * OUTPUTS,
                                   share);
    }
  });
}

// Of R rows, the sums of `inputs` inputs in runs, each folded: of the outputs of V vectors from the FIRST-th on of each of HALVES
// halves from `half` on. Codes by lanes (byte_lanes.h).
template <int R, int HALVES, int FIRST, int V, typename Block>
HEADRACE_APART void lane_tile(const float *x, int64_t x_stride, const Block &w, int64_t inputs, int64_t run, int half,
                              Folding fold, float *sums, const char *next) {
  constexpr int STEP = 2 * Block::BYTES * HALVES * V / 8, LINES = (STEP + 63) / 64;  // of all halves and vectors its share
  const bool folds = fold.scales;
  next += (half * 4 + FIRST) / V * (inputs / 2) * STEP;
  const auto each_sum = [&](auto f) HEADRACE_ALWAYS_INLINE {
    HEADRACE_EACH(r, R, HEADRACE_EACH(h, HALVES, HEADRACE_EACH(v, V, f(Constant<r>{}, Constant<h>{}, Constant<v>{}))));
  };
  const auto column = [&](int h, int v) HEADRACE_ALWAYS_INLINE { return w.column(half + h, FIRST + v); };
  for (int64_t begin = 0; begin < inputs; begin += run) {
    vf sum[R][HALVES][V];
    each_sum([&](auto r, auto h, auto v)
                 HEADRACE_ALWAYS_INLINE { sum[r][h][v] = folds ? vf{} : load(sums + r * OUTPUTS + column(h, v)); });
    for (int64_t i = begin; i < begin + run; i += 2, next += STEP) {
      fetch_lines<LINES, TO_L1>(next);
      HEADRACE_EACH(h, HALVES, {
        w.each_number(i, half + h, [&](auto v, auto odd, vf number) HEADRACE_ALWAYS_INLINE {
          if constexpr (v >= FIRST && v < FIRST + V)
            HEADRACE_EACH(r, R,
                          { sum[r][h][v - FIRST] = madd(splat(x[r * x_stride + i + odd]), number, sum[r][h][v - FIRST]); });
        });
      });
    }
    each_sum([&](auto r, auto h, auto v) HEADRACE_ALWAYS_INLINE {
      float *to = sums + r * OUTPUTS + column(h, v);
      store(to, folds ? fold.folded(sum[r][h][v], load(to), r, column(h, v)) : sum[r][h][v]);
    });
    if (folds) fold = fold.next();
  }
}

// Weights of a block in fp32.
template <typename Block> void copy(const Block &w, int64_t inputs, float *to) {
  if constexpr (Block::LANES) {
    for (int64_t i = 0; i < inputs; i += 2)
      each<2>([&](auto half) {
        w.each_number(i, half, [&](auto v, auto odd, vf number) HEADRACE_ALWAYS_INLINE {
          store(to + (i + odd) * OUTPUTS + w.column(half, v), number);
        });
      });
    return;
  }
  const auto copy_input = [&](int64_t i, auto odd) {
    for (int64_t column = 0; column < OUTPUTS; column += W) {
      vf x[1];
      w.load(i, odd, column, x);
      store(to + i * OUTPUTS + column, x[0]);
    }
  };
  for (int64_t i = 0; i < inputs; i += 2) {
    copy_input(i, Constant<0>{});
    if (i + 1 < inputs) copy_input(i + 1, Constant<1>{});
  }
}

template <typename S> void order(int64_t rows, float *sums) {
  for (int64_t i = 0; i < rows * OUTPUTS; i += 2 * W) {
    vf first = load(sums + i), second = load(sums + i + W);
    in_order(static_cast<const S *>(nullptr), first, second);
    store(sums + i, first);
    store(sums + i + W, second);
  }
}

constexpr int64_t MOST_PASS_ROWS = 128;  // of a task: their sums (32 KB) and inputs stay in L2
constexpr int64_t WIDE_W = OUTPUTS * PASS_INPUTS, WIDE_X = 2 * MOST_PASS_ROWS * PASS_INPUTS;
constexpr int64_t PASS_SCRATCH = room<float>(WIDE_W) + room<float>(WIDE_X);  // bytes

// Up to four rows by lanes: as many sums side by side as there are registers for.
template <typename Block>
void pass_lanes(int rows, Rows x, const Block &w, int64_t inputs, int64_t run, const Folding &fold, float *sums,
                const char *next) {
  by_rows<4, 3, 2, 1>(rows, [&](int, auto count) {
    const auto tile = [&](auto halves, auto first, auto vectors, int half) {
      lane_tile<count, halves, first, vectors>(x.x, x.stride, w, inputs, run, half, fold, sums, next);
    };
    if constexpr (count == 1) return tile(Constant<2>{}, Constant<0>{}, Constant<4>{}, 0);
    for (int half = 0; half < 2; ++half)
      if constexpr (count == 2) tile(Constant<1>{}, Constant<0>{}, Constant<4>{}, half);
      else {
        tile(Constant<1>{}, Constant<0>{}, Constant<2>{}, half);
        tile(Constant<1>{}, Constant<2>{}, Constant<2>{}, half);
      }
  });
}

template <typename T, typename F, typename G>
void pass_by_lanes(const T *x, int64_t x_stride, int rows, int64_t inputs, F block, int run, G fold, float *sums,
                   Scratch memory) {
  using Block = decltype(block(0));
  float *wide_x = memory.take<float>(LANE_ROWS * BLOCK_INPUTS);
  memset(sums, 0, rows * OUTPUTS * sizeof(float));
  for (int64_t k = 0; k < inputs; k += BLOCK_INPUTS) {
    const int64_t count = inputs - k < BLOCK_INPUTS ? inputs - k : BLOCK_INPUTS;
    const Block w = block(k);
    const Rows from = fp32_rows(x + k, x_stride, rows, count, wide_x);
    pass_lanes(rows, from, w, count, run ? run : count, fold(k), sums, w.memory() + count * Block::BYTES);
  }
}

// `rows` rows of x by all inputs of 64 outputs. block(k): the weights from input k on; fold(k): what becomes of the products of
// `run` inputs from there on, if run is not 0, and of the runs after it of the same BLOCK_INPUTS inputs. Few rows read weights as
// they are stored, more of them a copy in fp32.
template <typename T, typename F, typename G>
void pass_all(const T *x, int64_t x_stride, int rows, int64_t inputs, F block, int run, G fold, float *sums, Scratch memory) {
  using Block = decltype(block(0));
  if constexpr (Block::LANES)
    if (rows <= LANE_ROWS) return pass_by_lanes(x, x_stride, rows, inputs, block, run, fold, sums, memory);
  const bool stored = rows <= Block::STORED_ROWS;
  float *wide_w = memory.take<float>(WIDE_W), *wide_x = memory.take<float>(WIDE_X);
  memset(sums, 0, rows * OUTPUTS * sizeof(float));
  // Few rows pass before the next block has come.
  const int most = stored && rows > FEW_ROWS && !run ? Block::INPUTS : PASS_INPUTS;
  for (int64_t k = 0; k < inputs; k += most) {
    const int count = static_cast<int>(inputs - k < most ? inputs - k : most);
    const Block w = block(k);
    const char *next = w.memory() + count * Block::BYTES;
    const Rows from = fp32_rows(x + k, x_stride, rows, count, wide_x);
    const int each = run ? run : count;
    if (stored) {
      pass<Block::BYTES, Block::BYTES>(rows, from, w, count, each, fold(k), sums, next);
    } else {
      copy(w, count, wide_w);
      constexpr int LINE = 64;  // a share is less: many rows
      pass<Block::BYTES, LINE>(rows, from, PlainWeights<float>{wide_w}, count, each, fold(k), sums, next);
    }
  }
  if (stored) order<typename Block::Same>(rows, sums);
}

}  // namespace headrace::HEADRACE_NS
