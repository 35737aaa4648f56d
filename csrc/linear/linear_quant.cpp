// Products with quantised weights: y[m, n] = sum over k of x[m, k] * (scale * q[n, k] + offset), sums in fp32.
//
// M: rows, N: outputs, K: inputs. Codes are packed by blocks of 64 outputs and pairs of inputs, alike for every
// instruction set (kernels.quantized.Quantized).
//   8 bits: [N / 64][K / 2][4][2][16], by input of the pair and then 16 outputs; e4m3: [N / 64][K / 2][64][2].
//   4 bits: words of 16 bits [N / 64][K / 2][16][2]: bits 4c..4c+3 of word [l][p] are q, from 0 on, of output 16 c + l and
//   input p of the pair. 5 and 6 bits: the lower four so, and what is above behind them; 2 and 3 bits: few_bits.h.
// Every output is one chain of sums, whatever M, tile, block or thread: int8, with one scale for all inputs, over these in
// ascending order; all others over the inputs of a run (Scaling) from 0, then acc = sum * scale + acc over ascending runs,
// and acc = (sum of the run's x) * offset + acc where there are offsets. With AMX the chains of int8 and of int4 in groups of
// 64 go by steps of 32 inputs (tiles.h), where these are a multiple of 32.
#include "linear/codes.h"
#include "linear/linear.h"
#include "linear/linear_w8a8.h"
#include "linear/panel.h"
#include "linear/passes.h"
#include "linear/scales.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t BLOCK_INPUTS = 256;  // whose scales are widened together
constexpr int64_t LEAST_RUN = 16;
constexpr int64_t SCALES = BLOCK_INPUTS / LEAST_RUN * COLUMNS;

// All that becomes of the products of a run, for one block of outputs, from some row on.
template <typename Codes> class Folds {
 public:
  Folds(const LinearOf<Codes> &a, int64_t block, int64_t first, Scratch &memory)
      : a(a), own(a.scaling, a.scales, a.inputs, block), first(first), scales(memory.take<float>(SCALES)),
        offsets(memory.take<float>(SCALES)) {}

  // Of the runs of `inputs` inputs, at most BLOCK_INPUTS, from `input` on; good until the next call.
  Folding at(int64_t input, int64_t inputs) const {
    const int64_t run = a.scaling.run, runs = a.inputs / run;
    own.widen(input, inputs / run, scales, offsets);
    if (!a.x_sums) return {scales};
    return {scales, offsets, a.x_sums + first * runs + input / run, runs};
  }

  static constexpr int64_t SCRATCH = 2 * room<float>(SCALES);  // bytes

 private:
  const LinearOf<Codes> &a;
  BlockScales own;
  int64_t first;
  float *scales, *offsets;
};

#ifdef __AVX512BF16__

// bf16 x where the processor multiplies pairs: few rows decode codes in registers, more rows decode a block once, and
// either adds up the same products in the same order.

constexpr int64_t BLOCK_PAIRS = 128;  // pairs decoded at once: 32 KB, which stay in L1 while rows pass by
constexpr int64_t DECODED = BLOCK_PAIRS * Decoded::BYTES;
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

// folds(k, pairs): of the pairs from the k-th on.
template <typename Codes, typename F>
void multiply_pairs(const LinearOf<Codes> &a, const byte *codes, F folds, int64_t first, int64_t last, float *sums,
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
    const Folding fold = folds(k, count);
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

constexpr int64_t GROUP = 64;  // inputs under one scale where tiles multiply codes in groups
constexpr int64_t GROUP_STEPS = GROUP / STEP_INPUTS;
constexpr int64_t AHEAD = 4096;  // bytes that tiles fetch ahead

// Decoded a slab at a time.
template <typename Codes> struct CodeSource {
  static constexpr int64_t LINES = TILE * Codes::BYTES / 64, SCALED = Codes::GROUPED ? GROUP_STEPS : 0;

  const byte *codes;         // [blocks][steps][16 pairs]
  const bf16 *block_scales;  // [blocks][32 steps / 64][64]
  int64_t steps;
  byte *decoded;

  const bf16 *at(int64_t block, int64_t step) const {
    return reinterpret_cast<const bf16 *>(codes + (block * steps + step) * LINES * 64);
  }

  const bf16 *ready(int64_t block, int64_t step, int64_t count) const {
    decode_block<Codes>({}, reinterpret_cast<const byte *>(at(block, step)), count * TILE, decoded);
    return reinterpret_cast<const bf16 *>(decoded);
  }

  const bf16 *scales(int64_t block, int64_t step) const { return block_scales + (block * steps + step) * STEP_INPUTS; }
};

// Up to 16 rows: tiles multiply one step of weights when the next has been decoded too, since it takes a while until what
// vectors store can be read by tiles.
template <typename Codes>
HEADRACE_APART void multiply_strip(const bf16 *x, int64_t x_stride, int64_t rows, const byte *codes, const bf16 *scales,
                                   int64_t steps, float *sums, byte *decoded) {
  constexpr int64_t STEP = TILE * Codes::BYTES, ROOM = TILE * Decoded::BYTES;
  Tiles tiles;
  tiles.take(static_cast<int>(rows));
  if (Codes::GROUPED) memset(sums, 0, rows * COLUMNS * sizeof(float));
  ScaledSums scaled(rows);
  decode_block<Codes, AHEAD>({}, codes, TILE, decoded);
  for (int64_t i = 0; i < steps; ++i) {
    if (i + 1 < steps) decode_block<Codes, AHEAD>({}, codes + (i + 1) * STEP, TILE, decoded + (i + 1) % 2 * ROOM);
    const bf16 *w = reinterpret_cast<const bf16 *>(decoded + i % 2 * ROOM);
    tile_steps<0>(x + i * STEP_INPUTS, x_stride, w, 2 * COLUMNS, 1, {w, 0, 0});
    if (Codes::GROUPED && i % GROUP_STEPS == GROUP_STEPS - 1) scaled.take(scales + i / GROUP_STEPS * GROUP, sums);
  }
  Codes::GROUPED ? scaled.end() : store_row(sums, COLUMNS);
}

// More, but fewer than panels want: two steps are decoded, which all groups of 16 rows read from L1. The last group may
// hold rows of the one before: the same bits again, in sums of their own.
template <typename Codes>
void multiply_groups(const bf16 *x, int64_t x_stride, int64_t rows, const byte *codes, const bf16 *scales, int64_t steps,
                     float *sums, byte *decoded) {
  const bf16 *w = reinterpret_cast<const bf16 *>(decoded);
  const int64_t full = rows / TILE * TILE;
  alignas(64) float last[TILE * COLUMNS];
  Tiles tiles;
  tiles.take(TILE);
  if (Codes::GROUPED) {
    memset(sums, 0, full * COLUMNS * sizeof(float));
    memset(last, 0, sizeof last);
  }
  ScaledSums scaled(TILE);
  for (int64_t k = 0; k < steps; k += GROUP_STEPS) {
    const int64_t count = steps - k < GROUP_STEPS ? steps - k : GROUP_STEPS;
    decode_block<Codes, AHEAD>({}, codes + k * TILE * Codes::BYTES, count * TILE, decoded);
    for (int64_t row = 0; row < rows; row += TILE) {
      const bf16 *from = x + (row < full ? row : rows - TILE) * x_stride + k * STEP_INPUTS;
      float *to = row < full ? sums + row * COLUMNS : last;
      if (!Codes::GROUPED && k > 0) load_row(to, COLUMNS);
      else clear_sums();
      tile_steps<0>(from, x_stride, w, 2 * COLUMNS, count, {w, 0, 0});
      Codes::GROUPED ? scaled.take(scales + k * STEP_INPUTS, to) : store_row(to, COLUMNS);
    }
  }
  if (Codes::GROUPED) scaled.end();
  memcpy(sums + full * COLUMNS, last + (TILE + full - rows) * COLUMNS, (rows - full) * COLUMNS * sizeof(float));
}

template <typename Codes>
void multiply_tiles(const LinearQuant &a, const byte *codes, const bf16 *scales, int64_t first, int64_t last, float *sums,
                    byte *decoded) {
  const bf16 *x = static_cast<const bf16 *>(a.x) + first * a.x_stride;
  const auto multiply = last - first <= TILE ? multiply_strip<Codes> : multiply_groups<Codes>;
  multiply(x, a.x_stride, last - first, codes, scales, a.inputs / STEP_INPUTS, sums, decoded);
}

template <typename Codes> void multiply_panels(const LinearOf<Codes> &a) {
  each_panel(a, room<byte>(DECODED), [&](int64_t block, Scratch memory) {
    return CodeSource<Codes>{static_cast<const byte *>(a.codes) + block * a.inputs / 2 * Codes::BYTES,
                             static_cast<const bf16 *>(a.scales) + block * a.inputs, a.inputs / STEP_INPUTS,
                             memory.take<byte>(DECODED)};
  });
}

// Whether tiles take it: int8, and codes of four bits whose scales are bf16 for 64 inputs.
template <typename Codes> bool tiled(const LinearOf<Codes> &) { return false; }
inline bool tiled(const LinearOf<Int8> &a) { return a.inputs % STEP_INPUTS == 0; }
inline bool tiled(const LinearOf<Int4> &a) {
  const Scaling &s = a.scaling;
  return s.number == Number::bf16 && s.offset == Offset::none && !s.subs && s.group == GROUP;
}

template <typename Codes> constexpr bool TILES = false;
template <> constexpr bool TILES<Int8> = true;
template <> constexpr bool TILES<Int4> = true;

#endif

// bf16 x.
template <typename Codes, typename F>
void multiply_bf16(const LinearOf<Codes> &a, const byte *codes, F folds, int64_t block, int64_t first, int64_t last,
                   float *sums, Scratch memory) {
  byte *decoded = memory.take<byte>(DECODED);
#ifdef __AMX_BF16__
  if constexpr (TILES<Codes>)
    if (tiled(a)) {
      const bf16 *scales = Codes::GROUPED ? static_cast<const bf16 *>(a.scales) + block * a.inputs : nullptr;
      return multiply_tiles<Codes>(a, codes, scales, first, last, sums, decoded);
    }
#else
  (void)block;
#endif
  multiply_pairs(a, codes, [&](int64_t k, int64_t pairs) { return folds(2 * k, 2 * pairs); }, first, last, sums, decoded);
}

#endif

// All inputs of one packed block of outputs for rows first..last-1 of x; sums [rows, 64]; folds(input, inputs): see Folds.
// bf16 x goes by pairs where the processor multiplies them. Otherwise codes become fp32 as they are read, or once for more
// rows than a few (passes.h).
template <typename T, typename Codes, typename F>
void multiply(const LinearOf<Codes> &a, const T *x, int64_t x_stride, F folds, int64_t block, int64_t first, int64_t last,
              float *sums, Scratch memory) {
  const byte *codes = static_cast<const byte *>(a.codes) + block * (a.inputs / 2 * Codes::BYTES);
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == sizeof(bf16)) return multiply_bf16(a, codes, folds, block, first, last, sums, memory);
#endif
  const Codes format = format_of(a);
  const int64_t run = Codes::GROUPED ? a.scaling.run : 0;
  pass_all(
      x + first * x_stride, x_stride, static_cast<int>(last - first), a.inputs,
      [=](int64_t k) { return format.reader(codes + k * Codes::Reader::BYTES); }, static_cast<int>(run),
      [&](int64_t k) { return folds(k, run); }, sums, memory);
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
      if constexpr (Codes::GROUPED) {
        const Folds folds(own, block, first, scratch);
        const auto at = [&](int64_t input, int64_t inputs) { return folds.at(input, inputs); };
        return multiply(own, x, x_stride, at, block, first, last, sums, scratch);
      }
      const float *wanted_last = static_cast<const float *>(own.scales) + block * COLUMNS;  // of outputs
      for (int64_t c = 0; c < COLUMNS; c += 16) __builtin_prefetch(wanted_last + c);
      multiply(own, x, x_stride, [](int64_t, int64_t) { return Folding{}; }, block, first, last, sums, scratch);
    };
    each_block<T>(a, MOST_PASS_ROWS, SCRATCH + Folds<Codes>::SCRATCH, multiply_block);
  };
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == sizeof(bf16)) return multiply_rows(static_cast<const bf16 *>(a.x), a.x_stride);
#endif
  with_rows<T>(a, multiply_rows);
}

template <typename T, typename Codes> void linear_codes(LinearOf<Codes> a) {
  if (a.order) a = in_order<T>(a);
#ifdef __AMX_BF16__
  if constexpr (sizeof(T) == sizeof(bf16) && TILES<Codes>) {
    if (tiled(a) && a.groups.each) return by_height<T>(a, FEWEST_PANEL_ROWS, multiply_panels<Codes>, multiply_blocks<T, Codes>);
    if (tiled(a) && a.rows >= FEWEST_PANEL_ROWS) return multiply_panels(a);
  }
#endif
  if (Codes::GROUPED && a.scaling.offset != Offset::none) a.x_sums = sums_of_runs<T>(a);
  multiply_blocks<T>(a);
}

}  // namespace

template <typename T> void linear_quant(const LinearQuant &any) {
  if (any.form == Form::w8a8) return linear_w8a8<T>(any);
  with_format(any, [](const auto &a) { linear_codes<T>(a); });
}

HEADRACE_BOTH_TYPES(linear_quant, LinearQuant)

}  // namespace headrace::HEADRACE_NS
