// Products with quantised weights: y[m, n] = scale * sum over k of x[m, k] * q[n, k], sums in fp32.
//
// M: rows, N: outputs, K: inputs. Codes are packed by blocks of 64 outputs and pairs of inputs, alike for every
// instruction set (kernels.quantized.Quantized).
//   int8: codes [N / 64][K / 2][4][2][16], by input of the pair and then 16 outputs; scales fp32 [N], one a row.
//   int4: words of 16 bits [N / 64][K / 2][16][2]: bits 4c..4c+3 of word [l][p] are q + 8 of output 16 c + l and input
//   p of the pair; scales bf16 [N / 64][K / 64][64], one for 64 inputs.
// Every output is one chain of sums, whatever M, tile, block or thread: int8 over all inputs in ascending order; int4
// over the inputs of a group from 0, then acc = sum * scale + acc over ascending groups. With AMX the chains go by steps
// of 32 inputs (tiles.h), where these are a multiple of 32.
#include "linear/codes.h"
#include "linear/linear.h"
#include "linear/panel.h"
#include "linear/passes.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t GROUP = 64;  // inputs under one scale where formats are GROUPED

#ifdef __AVX512BF16__

// bf16 x where the processor multiplies pairs: few rows decode codes in registers, more rows decode a block once, and
// either adds up the same products in the same order.

constexpr int64_t BLOCK_PAIRS = 128;  // pairs decoded at once: 32 KB, which stay in L1 while rows pass by
constexpr int64_t DECODED = BLOCK_PAIRS * Decoded::BYTES;
constexpr int64_t FETCHED = 8192;  // bytes that few rows fetch ahead

// sums[R][64] += x[R][pairs] . w[pairs][64], group by group under `scales` where there are any, fetching LINES cache
// lines of `next` for each pair meanwhile.
template <int R, typename Codes, int LINES>
void tile(const bf16 *x, int64_t x_stride, const byte *w, int64_t pairs, const bf16 *scales, float *sums, const byte *next) {
  const int64_t run = scales ? GROUP / 2 : pairs;
  for (int64_t begin = 0; begin < pairs; begin += run, scales += scales ? GROUP : 0) {
    __m512 sum[R][4];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 4; ++c) sum[r][c] = scales ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * COLUMNS + c * 16);
    for (int64_t i = begin; i < begin + run; ++i) {
      for (int line = 0; line < LINES; ++line) {
        const byte *from = next + (i * LINES + line) * LINE_BYTES;
        (Codes::FILLS_L1 && small_l1) ? fetch_lines<1, TO_L2>(from) : fetch_lines<1>(from);
      }
      __m512bh weight[4];
      Codes::decode(w + i * Codes::BYTES, weight);
      for (int r = 0; r < R; ++r) {
        const __m512bh input = splat_pair(x + r * x_stride + 2 * i);
        for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], input, weight[c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 4; ++c) {
        float *to = sums + r * COLUMNS + c * 16;
        store(to, scales ? madd((vf)sum[r][c], load(scales + c * 16), load(to)) : (vf)sum[r][c]);
      }
  }
}

template <typename Codes, int LINES, int MOST = MOST_ROWS>
void tile_of(int rows, const bf16 *x, int64_t x_stride, const byte *w, int64_t pairs, const bf16 *scales, float *sums,
             const byte *next) {
  with_tile_rows<MOST>(rows, [&](auto count) { tile<count, Codes, LINES>(x, x_stride, w, pairs, scales, sums, next); });
}

template <typename Codes>
void multiply_pairs(const LinearQuant &a, const byte *codes, const bf16 *scales, int64_t first, int64_t last, float *sums,
                    byte *decoded) {
  const bf16 *x = static_cast<const bf16 *>(a.x) + first * a.x_stride;
  constexpr int LINES = Codes::BYTES / LINE_BYTES;  // of a pair
  const int64_t pairs = a.inputs / 2;
  const Tiling tiling(last - first);
  memset(sums, 0, tiling.rows * COLUMNS * sizeof(float));
  if (tiling.rows <= TILE_ROWS)
    return tile_of<Codes, LINES, TILE_ROWS>(tiling.rows, x, a.x_stride, codes, pairs, scales, sums, codes + FETCHED);
  for (int64_t k = 0; k < pairs; k += BLOCK_PAIRS) {
    const int64_t count = pairs - k < BLOCK_PAIRS ? pairs - k : BLOCK_PAIRS;
    const byte *next = codes + (k + count) * Codes::BYTES;
    decode_block<Codes>(codes + k * Codes::BYTES, count, decoded);
    const bf16 *group = scales ? scales + 2 * k : nullptr;
    for (int turn = 0; turn < tiling.tiles; ++turn) {
      const int row = tiling.first(turn), n = tiling.first(turn + 1) - row;
      const bf16 *from = x + row * a.x_stride + 2 * k;
      float *to = sums + row * COLUMNS;
      // The first tiles fetch the next block meanwhile, one line for each pair; a lone one fetches all of it.
      if (tiling.tiles == 1) tile_of<Decoded, LINES>(n, from, a.x_stride, decoded, count, group, to, next);
      else if (turn < LINES)
        tile_of<Decoded, 1>(n, from, a.x_stride, decoded, count, group, to, next + turn * count * LINE_BYTES);
      else tile_of<Decoded, 0>(n, from, a.x_stride, decoded, count, group, to, next);
    }
  }
}

#ifdef __AMX_BF16__

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
    decode_block<Codes>(reinterpret_cast<const byte *>(at(block, step)), count * TILE, decoded);
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
  decode_block<Codes, AHEAD>(codes, TILE, decoded);
  for (int64_t i = 0; i < steps; ++i) {
    if (i + 1 < steps) decode_block<Codes, AHEAD>(codes + (i + 1) * STEP, TILE, decoded + (i + 1) % 2 * ROOM);
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
    decode_block<Codes, AHEAD>(codes + k * TILE * Codes::BYTES, count * TILE, decoded);
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

template <typename Codes> bool tiled(const LinearOf<Codes> &a) {
  return a.inputs % (Codes::GROUPED ? GROUP : STEP_INPUTS) == 0;
}

#endif

template <typename Codes>
void multiply_bf16(const LinearOf<Codes> &a, const byte *codes, const bf16 *scales, int64_t first, int64_t last, float *sums,
                   Scratch memory) {
  byte *decoded = memory.take<byte>(DECODED);
#ifdef __AMX_BF16__
  if (tiled(a)) return multiply_tiles<Codes>(a, codes, scales, first, last, sums, decoded);
#endif
  multiply_pairs<Codes>(a, codes, scales, first, last, sums, decoded);
}

#endif

// All inputs of one packed block of outputs for rows first..last-1 of x; sums [rows, 64]; `scales` where they are GROUPED.
// bf16 x goes by pairs where the processor multiplies them. Otherwise codes become fp32 as they are read, or once for more
// rows than a few (passes.h).
template <typename T, typename Codes>
void multiply(const LinearOf<Codes> &a, const T *x, int64_t x_stride, const byte *codes, const bf16 *scales, int64_t first,
              int64_t last, float *sums, Scratch memory) {
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == sizeof(bf16)) return multiply_bf16(a, codes, scales, first, last, sums, memory);
#endif
  using Reader = typename Codes::Reader;
  pass_all(
      x + first * x_stride, x_stride, static_cast<int>(last - first), a.inputs,
      [codes](int64_t k) { return Reader{codes + k * Reader::BYTES}; },
      [scales](int64_t k) { return scales ? scales + k : nullptr; }, sums, memory);
}

constexpr int64_t SCRATCH = PASS_SCRATCH;  // bytes; decoded weights of bf16 pairs [128][64][2] take less

template <typename T, typename Codes> void multiply_blocks(const LinearOf<Codes> &a) {
  const int64_t block_bytes = a.inputs / 2 * Codes::BYTES;
  const auto multiply_rows = [&](auto *x, int64_t x_stride) {
    const auto multiply_block = [&](const LinearOf<Codes> &own, int64_t block, int64_t first, int64_t last, float *sums,
                                    Scratch scratch) {
      const byte *codes = static_cast<const byte *>(own.codes) + block * block_bytes;
      const bf16 *scales = Codes::GROUPED ? static_cast<const bf16 *>(own.scales) + block * a.inputs : nullptr;
      const float *last_wanted = static_cast<const float *>(own.scales) + block * COLUMNS;  // those of outputs
      for (int64_t c = 0; !Codes::GROUPED && c < COLUMNS; c += 16) __builtin_prefetch(last_wanted + c);
      multiply(own, x, x_stride, codes, scales, first, last, sums, scratch);
    };
    each_block<T>(a, MOST_PASS_ROWS, SCRATCH, multiply_block);
  };
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == sizeof(bf16)) return multiply_rows(static_cast<const bf16 *>(a.x), a.x_stride);
#endif
  with_rows<T>(a, multiply_rows);
}

template <typename T, typename Codes> void linear_codes(const LinearOf<Codes> &a) {
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
  with_format(any, [](const auto &a) { linear_codes<T>(a); });
}

HEADRACE_BOTH_TYPES(linear_quant, LinearQuant)

}  // namespace headrace::HEADRACE_NS
