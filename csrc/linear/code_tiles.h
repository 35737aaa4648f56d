// Products of codes (codes.h) by tiles of AMX: a step of inputs is decoded, and tiles multiply what was.
//
// Sums over a run of inputs (Scaling) begin at 0 and are folded as soon as it ends (Folding). A step is 32 inputs, or a run if
// that is shorter: a tile of weights has half as many pairs then. Int8, with one scale for all inputs, has no runs: its sums
// stay in the tiles.
#pragma once

#include "linear/codes.h"
#include "linear/folds.h"
#include "linear/panel.h"

#ifdef __AMX_BF16__

namespace headrace::HEADRACE_NS {

constexpr int64_t AHEAD = 4096;       // bytes that tiles fetch ahead
constexpr int64_t STRIP_INPUTS = 64;  // decoded at once for few groups of rows: their weights stay in L1
constexpr int HALF_STEP = STEP_INPUTS / 2;

template <typename Codes> int step_of(const LinearOf<Codes> &a) {
  return Codes::GROUPED && a.scaling.run < STEP_INPUTS ? HALF_STEP : STEP_INPUTS;
}

// The sums of tiles 0 to 3, of `rows` rows by 64 outputs, folded onto what is in memory. What tiles store takes a while to be
// there, so one lot is folded when the next is on its way.
class FoldedSums {
 public:
  explicit FoldedSums(int64_t rows) : rows(rows) { clear_sums(); }

  // to [rows, 64] = as `fold` has it, at the latest when end() is called. The tiles are 0 then.
  HEADRACE_ALWAYS_INLINE void take(const Folding &fold, float *sums) {
    store_row(part[turn], COLUMNS);
    clear_sums();
    end();
    latest = fold;
    to = sums;
    turn ^= 1;
  }

  HEADRACE_ALWAYS_INLINE void end() {
    if (to) fold_rows<1, COLUMNS>(part[turn ^ 1], latest, rows, to);
    to = nullptr;
  }

 private:
  int64_t rows;
  int turn = 0;
  Folding latest;
  float *to = nullptr;
  alignas(64) float part[2][TILE * COLUMNS];
};

// Numbers below 2^-126 are taken as 0 and made 0 from here to the end of the scope. What is computed there is a function of its
// own that is not inlined: compilers do not know that the mode matters.
class FlushedToZero {
 public:
  FlushedToZero() : before(_mm_getcsr()) { set(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
  ~FlushedToZero() { set(before); }

 private:
  static void set(unsigned how) {
    asm volatile("" ::: "memory");
    _mm_setcsr(how);
    asm volatile("" ::: "memory");
  }

  unsigned before;
};

// Whether one row goes by vectors, which takes less time where runs fill half a tile and where bytes become fp32 at once. The
// products and sums are those of tiles: of a step's even inputs and of its odd ones apart, fused multiply-adds in fp32 from 0
// on, with subnormal numbers as 0, then both added up and added to what the steps before them have come to (TDPBF16PS in
// Intel's Software Developer's Manual).
template <typename Codes> bool by_vectors(const LinearOf<Codes> &a) { return a.scaling.run < STEP_INPUTS; }
inline bool by_vectors(const LinearOf<Bytes> &) { return true; }

// products [inputs / run][64] of x [inputs].
template <typename Codes>
HEADRACE_APART void runs_of_row(Codes format, const float *x, const byte *codes, int64_t inputs, int64_t run, float *products) {
  constexpr int C = COLUMNS / W;
  const int64_t step = run < STEP_INPUTS ? run : STEP_INPUTS;
  for (int64_t k = 0; k < inputs; products += COLUMNS) {
    vf sum[C] = {};
    for (const int64_t end = k + run; k < end;) {
      vf even[C] = {}, odd[C] = {};
      for (const int64_t last = k + step; k < last; k += 2, codes += Codes::BYTES) {
        fetch_twice<(Codes::BYTES + 63) / 64>(codes + AHEAD);
        vf first[C], second[C];
        decode_wide(format, codes, first, second);
        HEADRACE_EACH(c, C, even[c] = madd(splat(x[k]), first[c], even[c]));
        HEADRACE_EACH(c, C, odd[c] = madd(splat(x[k + 1]), second[c], odd[c]));
      }
      HEADRACE_EACH(c, C, sum[c] += even[c] + odd[c]);
    }
    HEADRACE_EACH(c, C, store(products + c * W, sum[c]));
  }
}

template <typename Codes>
void multiply_row(const LinearOf<Codes> &a, const bf16 *x, const byte *codes, Folds &folds, float *sums) {
  alignas(64) float wide[BLOCK_INPUTS], products[SCALES];
  const int64_t run = a.scaling.run;
  memset(sums, 0, COLUMNS * sizeof(float));
  for (int64_t k = 0; k < a.inputs; k += BLOCK_INPUTS) {
    const int64_t count = a.inputs - k < BLOCK_INPUTS ? a.inputs - k : BLOCK_INPUTS;
    widen(x + k, wide, count);
    {
      FlushedToZero flushed;
      runs_of_row(format_of(a), wide, codes + k / 2 * Codes::BYTES, count, run, products);
    }
    Folding fold = folds.at(k);
    for (int64_t i = 0; i < count / run; ++i, fold = fold.next()) fold_rows<1, COLUMNS>(products + i * COLUMNS, fold, 1, sums);
  }
}

// Up to 16 rows: tiles multiply one step of weights when the next has been decoded too (two more ahead are no faster).
template <int STEP, typename Codes>
HEADRACE_APART void multiply_strip(const LinearOf<Codes> &a, const bf16 *x, int64_t rows, const byte *codes, Folds &folds,
                                   float *sums, byte *decoded) {
  constexpr int64_t ROOM = STEP / 2 * Decoded::BYTES;
  const Codes format = format_of(a);
  const int64_t run = a.scaling.run;
  Tiles tiles;
  tiles.take(static_cast<int>(rows), static_cast<int>(rows), STEP);
  if (Codes::GROUPED) memset(sums, 0, rows * COLUMNS * sizeof(float));
  FoldedSums folded(rows);
  Folding fold;
  decode_block<Codes, AHEAD>(format, codes, STEP / 2, decoded);
  for (int64_t k = 0, turn = 0; k < a.inputs; k += STEP, turn ^= 1) {
    codes += STEP / 2 * Codes::BYTES;
    if (k + STEP < a.inputs) decode_block<Codes, AHEAD>(format, codes, STEP / 2, decoded + (turn ^ 1) * ROOM);
    const bf16 *w = reinterpret_cast<const bf16 *>(decoded + turn * ROOM);
    tile_steps<0>(x + k, a.x_stride, w, 2 * COLUMNS, 1, {w, 0, 0});
    if constexpr (Codes::GROUPED) {
      if (k % BLOCK_INPUTS == 0) fold = folds.at(k);
      if ((k + STEP) & (run - 1)) continue;
      folded.take(fold, sums);
      fold = fold.next();
    }
  }
  if (Codes::GROUPED) folded.end();
  else store_row(sums, COLUMNS);
}

// More, but fewer than panels want: all groups of 16 rows read what was decoded from L1. The last group may hold rows of the
// one before: the same bits again, in sums of their own.
template <typename Codes>
void multiply_strips(const LinearOf<Codes> &a, const bf16 *x, int64_t rows, const byte *codes, Folds &folds, float *sums,
                     byte *decoded) {
  const bf16 *w = reinterpret_cast<const bf16 *>(decoded);
  const Codes format = format_of(a);
  const int64_t step = step_of(a), run = a.scaling.run, full = rows / TILE * TILE;
  alignas(64) float last[TILE * COLUMNS];
  Tiles tiles;
  tiles.take(TILE, TILE, step);
  if (Codes::GROUPED) {
    memset(sums, 0, full * COLUMNS * sizeof(float));
    memset(last, 0, sizeof last);
  }
  FoldedSums folded(TILE);
  Folding fold;
  for (int64_t k = 0; k < a.inputs; k += STRIP_INPUTS) {
    const int64_t count = a.inputs - k < STRIP_INPUTS ? a.inputs - k : STRIP_INPUTS;
    decode_block<Codes, AHEAD>(format, codes + k / 2 * Codes::BYTES, count / 2, decoded);
    if (Codes::GROUPED && k % BLOCK_INPUTS == 0) fold = folds.at(k);
    for (int64_t row = 0; row < rows; row += TILE) {
      const int64_t first = row < full ? row : rows - TILE;
      const bf16 *from = x + first * a.x_stride + k;
      float *to = row < full ? sums + row * COLUMNS : last;
      if constexpr (Codes::GROUPED) {
        Folding own = fold.from(first);
        for (int64_t i = 0; i < count; i += step) {
          const bf16 *columns = w + i * COLUMNS;
          tile_steps<0>(from + i, a.x_stride, columns, 2 * COLUMNS, 1, {w, 0, 0});
          if ((i + step) & (run - 1)) continue;
          folded.take(own, to);
          own = own.next();
        }
      } else {
        if (k > 0) load_row(to, COLUMNS);
        else clear_sums();
        tile_steps<0>(from, a.x_stride, w, 2 * COLUMNS, count / STEP_INPUTS, {w, 0, 0});
        store_row(to, COLUMNS);
      }
    }
    if (Codes::GROUPED) fold = fold.next(divided(count, run));
  }
  if (Codes::GROUPED) folded.end();
  memcpy(sums + full * COLUMNS, last + (TILE + full - rows) * COLUMNS, (rows - full) * COLUMNS * sizeof(float));
}

// The weights of a panel (panel.h), decoded a slab at a time. Of every format: what depends on it is behind a pointer.
template <bool RUNS> class CodeSource {
 public:
  static constexpr bool IN_RUNS = RUNS;

  // Of the blocks of 64 outputs from `block` on, for rows from `first` on.
  template <typename Codes>
  CodeSource(const LinearOf<Codes> &a, int64_t block, int64_t first, Scratch &memory)
      : step(step_of(a)), run(a.scaling.run), a(&a),
        codes(static_cast<const byte *>(a.codes) + block * a.inputs / 2 * Codes::BYTES), pair_bytes(Codes::BYTES),
        inputs(a.inputs), decoded(memory.take<byte>(DECODED)), folds(a, a.x_sums, block, first, memory),
        decode([](const void *product, const byte *from, int64_t pairs, byte *to) {
          decode_block<Codes>(format_of(*static_cast<const LinearOf<Codes> *>(product)), from, pairs, to);
        }) {}

  int64_t lines() const { return TILE * pair_bytes / LINE_BYTES; }  // of 32 inputs

  const bf16 *at(int64_t block, int64_t k) const { return reinterpret_cast<const bf16 *>(place(block, k)); }

  const bf16 *ready(int64_t block, int64_t k, int64_t count) {
    decode(a, place(block, k), count / 2, decoded);
    if (RUNS) fold = folds.at(k, block, count);
    return reinterpret_cast<const bf16 *>(decoded);
  }

  static constexpr int64_t SCRATCH = room<byte>(DECODED) + Folds::SCRATCH;

  int step;  // inputs, as a run has
  int64_t run;
  Folding fold;  // of what is ready

 private:
  const byte *place(int64_t block, int64_t k) const { return codes + (block * inputs + k) / 2 * pair_bytes; }

  const void *a;
  const byte *codes;
  int64_t pair_bytes, inputs;
  byte *decoded;
  Folds folds;
  void (*decode)(const void *product, const byte *codes, int64_t pairs, byte *decoded);
};

template <typename Codes> void multiply_panels(const LinearOf<Codes> &a) {
  using Source = CodeSource<Codes::GROUPED>;
  each_panel(a, Source::SCRATCH, [&](int64_t block, int64_t first, Scratch memory) { return Source(a, block, first, memory); });
}

}  // namespace headrace::HEADRACE_NS

#endif
