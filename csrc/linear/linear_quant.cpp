// Products with quantised weights: y[m, n] = sum over k of x[m, k] * (scale * q[n, k] + offset), sums in fp32.
//
// M: rows, N: outputs, K: inputs. Codes are packed by blocks of 64 outputs and pairs of inputs, alike for every
// instruction set (kernels.quantized.Quantized).
//   8 bits: [N / 64][K / 2][4][2][16], by input of the pair and then 16 outputs; e4m3: [N / 64][K / 2][64][2].
//   4 bits: words of 16 bits [N / 64][K / 2][16][2]: bits 4c..4c+3 of word [l][p] are q, from 0 on, of output 16 c + l and
//   input p of the pair. 5 and 6 bits: the lower four so, and what is above behind them; 2 and 3 bits: few_bits.h.
// Every output is one chain of sums, whatever M, tile, block or thread: int8, with one scale for all inputs, over these in
// ascending order; all others over the inputs of a run (Scaling) from 0, then acc = sum * scale + acc over ascending runs,
// and acc = (sum of the run's x) * offset + acc where there are offsets. With AMX the chains go by steps of 32 inputs
// (tiles.h), or a run if it is shorter; int8 so where inputs are a multiple of 32.
#include "linear/code_tiles.h"
#include "linear/codes.h"
#include "linear/folds.h"
#include "linear/linear.h"
#include "linear/linear_w8a8.h"
#include "linear/passes.h"

namespace headrace::HEADRACE_NS {

namespace {

#ifdef __AVX512BF16__

// bf16 x where the processor multiplies pairs: few rows decode codes in registers, more rows decode a block once, and
// either adds up the same products in the same order.

constexpr int64_t FETCHED = 8192;  // bytes that few rows fetch ahead

// sums[R][64] += x[R][pairs] . w[pairs][64], folded after each `run` pairs, fetching LINES cache lines of `next` for each pair
// meanwhile.
template <int R, typename Codes, int LINES>
void tile(Codes format, const bf16 *x, int64_t x_stride, const byte *w, int64_t pairs, int64_t run, Folding fold, float *sums,
          const byte *next) {
  constexpr int64_t STEP = Codes::FILLS_L1 ? LINES * LINE_BYTES : Codes::BYTES;
  const bool folds = fold.scales;
  for (int64_t begin = 0; begin < pairs; begin += run) {
    __m512 sum[R][4];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 4; ++c) sum[r][c] = folds ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * COLUMNS + c * 16);
    for (int64_t i = begin; i < begin + run; ++i) {
      for (int line = 0; line < LINES; ++line) {
        const byte *from = next + i * STEP + line * LINE_BYTES;
        (Codes::FILLS_L1 && small_l1) ? fetch_lines<1, TO_L2>(from) : fetch_lines<1>(from);
      }
      __m512bh weight[4];
      format.decode(w + i * Codes::BYTES, weight);
      for (int r = 0; r < R; ++r) {
        const __m512bh input = splat_pair(x + r * x_stride + 2 * i);
        for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], input, weight[c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 4; ++c) {
        float *to = sums + r * COLUMNS + c * 16;
        store(to, folds ? fold.folded((vf)sum[r][c], load(to), r, c * 16) : (vf)sum[r][c]);
      }
    if (folds) fold = fold.next();
  }
}

template <typename Codes, int LINES, int MOST = MOST_ROWS>
void tile_of(Codes format, int rows, const bf16 *x, int64_t x_stride, const byte *w, int64_t pairs, int64_t run,
             const Folding &fold, float *sums, const byte *next) {
  with_tile_rows<MOST>(rows,
                       [&](auto count) { tile<count, Codes, LINES>(format, x, x_stride, w, pairs, run, fold, sums, next); });
}

template <typename Codes>
void multiply_pairs(const LinearOf<Codes> &a, const byte *codes, Folds &folds, int64_t first, int64_t last, float *sums,
                    byte *decoded) {
  const bf16 *x = static_cast<const bf16 *>(a.x) + first * a.x_stride;
  constexpr int LINES = (Codes::BYTES + LINE_BYTES - 1) / LINE_BYTES;  // of a pair
  const Codes format = format_of(a);
  const int64_t pairs = a.inputs / 2;
  const Tiling tiling(last - first);
  memset(sums, 0, tiling.rows * COLUMNS * sizeof(float));
  for (int64_t k = 0; k < pairs; k += BLOCK_PAIRS) {
    const int64_t count = pairs - k < BLOCK_PAIRS ? pairs - k : BLOCK_PAIRS;
    const int64_t run = Codes::GROUPED ? a.scaling.run / 2 : count;
    const byte *from_codes = codes + k * Codes::BYTES, *next = from_codes + count * Codes::BYTES;
    const Folding fold = Codes::GROUPED ? folds.at(2 * k) : Folding{};
    if (tiling.rows <= TILE_ROWS) {
      tile_of<Codes, LINES, TILE_ROWS>(format, tiling.rows, x + 2 * k, a.x_stride, from_codes, count, run, fold, sums,
                                       from_codes + FETCHED);
      continue;
    }
    decode_block<Codes>(format, from_codes, count, decoded);
    for (int turn = 0; turn < tiling.tiles; ++turn) {
      const int row = tiling.first(turn), n = tiling.first(turn + 1) - row;
      const bf16 *from = x + row * a.x_stride + 2 * k;
      const Folding own = fold.from(row);
      float *to = sums + row * COLUMNS;
      // The first tiles fetch the next block meanwhile, one line for each pair; a lone one fetches all of it.
      if (tiling.tiles == 1) tile_of<Decoded, LINES>({}, n, from, a.x_stride, decoded, count, run, own, to, next);
      else if (turn < LINES)
        tile_of<Decoded, 1>({}, n, from, a.x_stride, decoded, count, run, own, to, next + turn * count * LINE_BYTES);
      else tile_of<Decoded, 0>({}, n, from, a.x_stride, decoded, count, run, own, to, next);
    }
  }
}

#ifdef __AMX_BF16__

// Whether tiles take it: int8 in whole steps, and all codes in runs.
template <typename Codes> bool tiled(const LinearOf<Codes> &a) { return Codes::GROUPED || a.inputs % STEP_INPUTS == 0; }

// Fewer rows than panels want.
template <typename Codes>
void multiply_tiled(const LinearOf<Codes> &a, const byte *codes, Folds &folds, int64_t first, int64_t last, float *sums,
                    byte *decoded) {
  const bf16 *x = static_cast<const bf16 *>(a.x) + first * a.x_stride;
  const int64_t rows = last - first;
  if constexpr (Codes::GROUPED)
    if (rows == 1 && by_vectors(a)) return multiply_row(a, x, codes, folds, sums);
  if (rows > TILE) return multiply_strips(a, x, rows, codes, folds, sums, decoded);
  step_of(a) == STEP_INPUTS ? multiply_strip<STEP_INPUTS>(a, x, rows, codes, folds, sums, decoded)
                            : multiply_strip<HALF_STEP>(a, x, rows, codes, folds, sums, decoded);
}
#endif

// bf16 x.
template <typename Codes>
void multiply_bf16(const LinearOf<Codes> &a, const byte *codes, Folds &folds, int64_t first, int64_t last, float *sums,
                   byte *decoded) {
#ifdef __AMX_BF16__
  if (tiled(a)) return multiply_tiled(a, codes, folds, first, last, sums, decoded);
  if constexpr (!Codes::GROUPED)  // all others are
#endif
    multiply_pairs(a, codes, folds, first, last, sums, decoded);
}

#endif

// All inputs of one packed block of outputs for rows first..last-1 of x; sums [rows, 64].
// bf16 x goes by pairs where the processor multiplies them. Otherwise codes become fp32 as they are read, or once for more
// rows than a few (passes.h).
template <typename T, typename Codes>
void multiply(const LinearOf<Codes> &a, const T *x, int64_t x_stride, Folds &folds, int64_t block, int64_t first, int64_t last,
              float *sums, Scratch memory) {
  const byte *codes = static_cast<const byte *>(a.codes) + block * (a.inputs / 2 * Codes::BYTES);
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == sizeof(bf16)) return multiply_bf16(a, codes, folds, first, last, sums, memory.take<byte>(DECODED));
#endif
  const Codes format = format_of(a);
  const int64_t run = Codes::GROUPED ? a.scaling.run : 0;
  Folding fold;
  const auto fold_at = [&](int64_t k) {
    if (!run) return Folding{};
    const int64_t within = k % BLOCK_INPUTS;
    if (within == 0) fold = folds.at(k);
    return fold.next(within / run);
  };
  pass_all(
      x + first * x_stride, x_stride, static_cast<int>(last - first), a.inputs,
      [=](int64_t k) { return format.reader(codes + k * Codes::Reader::BYTES); }, static_cast<int>(run), fold_at, sums, memory);
}

constexpr int64_t SCRATCH = PASS_SCRATCH;  // bytes; decoded weights of bf16 pairs [128][64][2] take less

// `rows` rows for the calling thread, not initialised.
template <typename T> T *own_rows(int64_t elements) {
  static thread_local Arena mine;
  return mine.at_least(room<T>(elements)).template take<T>(elements);
}

// The same with inputs in the order of the codes, of each group its own.
template <typename T, typename Codes> LinearOf<Codes> in_order(LinearOf<Codes> a) {
  T *ordered = own_rows<T>(a.rows * a.inputs);
  each_row(a, [&](const LinearOf<Codes> &own, int64_t row) {
    const T *from = static_cast<const T *>(a.x) + row * a.x_stride;
    for (int64_t i = 0; i < a.inputs; ++i) ordered[row * a.inputs + i] = from[own.order[i]];
  });
  a.x = ordered;
  a.x_stride = a.inputs;
  a.order = nullptr;
  return a;
}

template <typename T, typename Codes> const float *sums_of_runs(const LinearOf<Codes> &a) {
  static thread_local Arena mine;
  const int64_t runs = a.inputs / a.scaling.run;
  float *sums = mine.at_least(room<float>(a.rows * runs)).template take<float>(a.rows * runs);
  each_row(a, [&](const LinearOf<Codes> &, int64_t row) {
    sum_runs(static_cast<const T *>(a.x) + row * a.x_stride, a.inputs, a.scaling.run, sums + row * runs);
  });
  return sums;
}

template <typename T, typename Codes> void multiply_blocks(const LinearOf<Codes> &a) {
  const auto multiply_rows = [&](auto *x, int64_t x_stride) {
    const auto multiply_block = [&](const LinearOf<Codes> &own, int64_t block, int64_t first, int64_t last, float *sums,
                                    Scratch scratch) {
      Folds folds(own, own.x_sums, block, first, scratch);
      const float *wanted_last = static_cast<const float *>(own.scales) + block * COLUMNS;  // of outputs
      if (!Codes::GROUPED)
        for (int64_t c = 0; c < COLUMNS; c += 16) __builtin_prefetch(wanted_last + c);
      multiply(own, x, x_stride, folds, block, first, last, sums, scratch);
    };
    each_block<T>(a, MOST_PASS_ROWS, SCRATCH + Folds::SCRATCH, multiply_block);
  };
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == sizeof(bf16)) return multiply_rows(static_cast<const bf16 *>(a.x), a.x_stride);
#endif
  with_rows<T>(a, multiply_rows);
}

template <typename T, typename Codes> void linear_codes(LinearOf<Codes> a) {
  if (a.order) a = in_order<T>(a);
  if (Codes::GROUPED && a.scaling.offset != Offset::none) a.x_sums = sums_of_runs<T>(a);
#ifdef __AMX_BF16__
  if constexpr (sizeof(T) == sizeof(bf16)) {
    if (tiled(a) && a.groups.each) return by_height<T>(a, FEWEST_PANEL_ROWS, multiply_panels<Codes>, multiply_blocks<T, Codes>);
    if (tiled(a) && a.rows >= FEWEST_PANEL_ROWS) return multiply_panels(a);
  }
#endif
  multiply_blocks<T>(a);
}

}  // namespace

template <typename T> void linear_quant(const LinearQuant &any) {
  if (any.form == Form::w8a8) return linear_w8a8<T>(any);
  with_format(any, [](const auto &a) { linear_codes<T>(a); });
}

HEADRACE_BOTH_TYPES(linear_quant, LinearQuant)

}  // namespace headrace::HEADRACE_NS
