// Products of many rows with packed weights by tiles of AMX.
//
// A panel is up to 512 rows by some blocks of 64 outputs. Its inputs are cut into slabs of 256. Of a slab, the weights of a
// block (32 KB) and 32 rows of x (16 KB) meet in L1; all rows come from L2 once for each block, and from farther away once
// for the panel. Sums are met once for each slab: loaded, added to, stored, which changes no bit. Codes in runs (Scaling) meet
// theirs at each two runs, whose products take room in L1 too: their slabs are 128 inputs.
#pragma once

#include "isa/tiles.h"
#include "linear/folds.h"
#include "linear/linear.h"

#ifdef __AMX_BF16__

namespace headrace::HEADRACE_NS {

constexpr int64_t FEWEST_PANEL_ROWS = 4 * TILE;  // fewer rows wait for weights: see TileProduct

// Weights that are packed in pairs as tiles want them. A source knows some blocks' weights by block and input.
struct PairSource {
  static constexpr bool IN_RUNS = false;
  static constexpr int step = STEP_INPUTS;

  const bf16 *w;  // [blocks][pairs][64][2]
  int64_t inputs;

  static constexpr int64_t lines() { return 64; }  // cache lines of 32 inputs
  const bf16 *at(int64_t block, int64_t k) const { return w + (block * inputs + k) * COLUMNS; }
  const bf16 *ready(int64_t block, int64_t k, int64_t) const { return at(block, k); }  // to be multiplied
};

template <typename Source> class Panel {
 public:
  static constexpr int64_t GROUP = 2 * TILE;  // rows that go together through the tiles
  static constexpr int64_t BLOCKS = 4;        // of a panel whose rows do not stay in L2 with all their inputs

  // Rows of sums that `rows` rows take.
  static int64_t height(int64_t rows) { return (rows + GROUP - 1) / GROUP * GROUP; }

  // x [rows, inputs], at least 32 rows; sums [blocks, height, 64].
  Panel(const bf16 *x, int64_t x_stride, int64_t rows, Source &source, int64_t blocks, int64_t inputs, float *sums)
      : x(x), x_stride(x_stride), rows(rows), source(source), blocks(blocks), inputs(inputs), sums(sums) {}

  // done(block, first row, last row, the first one's sums) as soon as these are whole, of one block after another.
  template <typename F> void run(F done) const {
    Tiles tiles;
    tiles.take(TILE, TILE, source.step);
    if (Source::IN_RUNS) memset(sums, 0, blocks * height(rows) * COLUMNS * sizeof(float));
    const int64_t squares = height(rows) / GROUP * 2;  // of a block: each fetches its share of the next weights
    with_lines<16>(static_cast<int>((source.lines() + squares - 1) / squares), [&](auto each) {
      for (int64_t k = 0; k < inputs; k += SLAB)
        blocks > 2 ? this->slab<each, true>(k, done) : this->slab<each, false>(k, done);
    });
  }

 private:
  static constexpr int64_t SLAB = Source::IN_RUNS ? 128 : 256;  // inputs
  static constexpr int64_t HALF = COLUMNS / 2;                  // outputs of a square
  static constexpr int64_t FETCHED = 2;  // rows of the next slab that a square fetches: half of all; all are no faster

  const bf16 *x;
  int64_t x_stride, rows;
  Source &source;
  int64_t blocks, inputs;
  float *sums;

  // A slab of all rows and blocks. FAR: x comes from farther than L2.
  template <int LINES, bool FAR, typename F> HEADRACE_APART void slab(int64_t k, F done) const {
    const int64_t count = inputs - k < SLAB ? inputs - k : SLAB, steps = count / STEP_INPUTS;
    const bool last = k + count == inputs;
    for (int64_t block = 0; block < blocks; ++block) {
      const bf16 *next = block + 1 < blocks ? source.at(block + 1, k) : last ? source.at(blocks, 0) : source.at(0, k + count);
      const bf16 *w = source.ready(block, k, count);
      for (int64_t row = 0; row < rows; row += GROUP) {
        // The last 32 rows, of which some were met before: the same bits again, in sums of their own.
        const int64_t from = row + GROUP <= rows ? row : rows - GROUP;
        float *to = sums + (block * height(rows) + row) * COLUMNS;
        for (int64_t half = 0; half < 2; ++half, next += steps * LINES * LINE) {
          const bf16 *next_x = x_at(from + (2 * block + half) * FETCHED, last ? 0 : k + count);
          const auto fetch = [&](int64_t i) HEADRACE_ALWAYS_INLINE {
            fetch_lines<LINES, TO_L2>(next + i * LINES * LINE);
            if constexpr (FAR)
              each<FETCHED>([&](auto r) HEADRACE_ALWAYS_INLINE { fetch_lines<1, TO_L2>(next_x + r * x_stride + i * LINE); });
          };
          const bf16 *columns = w + 2 * HALF * half;
          float *square = to + HALF * half;
          if constexpr (Source::IN_RUNS)
            add_runs(from, k, columns, count, source.fold.from(from).beside(HALF * half), square, fetch);
          else add_steps(x_at(from, k), columns, steps, k > 0, square, fetch);
        }
        if (last) done(block, row, from + GROUP, to + (row - from) * COLUMNS);
      }
    }
  }

  const bf16 *x_at(int64_t row, int64_t k) const { return x + row * x_stride + k; }

  // Sums [32, 32 of 64] of 32 rows of x by half a block of weights, added to what is there or not.
  template <typename F>
  HEADRACE_ALWAYS_INLINE void add_steps(const bf16 *from, const bf16 *w, int64_t steps, bool more, float *to, F fetch) const {
    more ? load_square(to, COLUMNS) : clear_sums();
    square_steps(from, x_stride, w, 2 * COLUMNS, steps, fetch);
    store_square(to, COLUMNS);
  }

  // The same run by run, folded two at a time: what tiles store takes a while to be there, so two are folded when the next two
  // are on their way.
  template <typename F>
  HEADRACE_ALWAYS_INLINE void add_runs(int64_t row, int64_t k, const bf16 *w, int64_t count, Folding fold, float *to,
                                       F fetch) const {
    constexpr int64_t SQUARE = GROUP * HALF;
    alignas(64) float part[2][TOGETHER * SQUARE];
    const bf16 *from = x_at(row, k);
    const int64_t run = source.run, step = source.step, pair = TOGETHER * run;
    for (int64_t i = 0, turn = 0; i < count; i += pair, turn ^= 1) {
      for (int64_t r = 0; r < TOGETHER && i + r * run < count; ++r) {
        clear_sums();
        for (int64_t at = i + r * run; at < i + (r + 1) * run; at += step)
          square_steps(from + at, x_stride, w + at * COLUMNS, 2 * COLUMNS, 1, [&](int64_t) HEADRACE_ALWAYS_INLINE {
            if (at % STEP_INPUTS == 0) fetch(at / STEP_INPUTS);
          });
        store_square(part[turn] + r * SQUARE, HALF);
      }
      if (i > 0) {
        fold_rows<TOGETHER, HALF>(part[turn ^ 1], fold, GROUP, to);
        fold = fold.next(TOGETHER);
      }
      if (i + pair >= count)
        i + run < count ? fold_rows<TOGETHER, HALF>(part[turn], fold, GROUP, to)
                        : fold_rows<1, HALF>(part[turn], fold, GROUP, to);
    }
  }

  static constexpr int TOGETHER = 2;  // runs
};

// Product and results of all rows, panel by panel. source(first block, first row, scratch): a panel's weights; scratch: bytes
// for its use.
template <typename Any, typename F> void each_panel(const Any &a, int64_t scratch, F source) {
  using Source = decltype(source(0, 0, Scratch(nullptr)));
  constexpr int64_t GROUP = Panel<Source>::GROUP, L2_INPUTS = 768 * 1024;  // so many inputs of bf16 stay in L2
  const int64_t most = a.x_stride % 2048 == 0 ? 256 : 512;  // rows at one place of their pages meet in a 64th of L2's sets
  const int64_t ranges = (a.rows + most - 1) / most, groups = (a.rows + GROUP - 1) / GROUP;
  const bool far = (groups + ranges - 1) / ranges * GROUP * a.inputs > L2_INPUTS;
  const int64_t width = far ? Panel<Source>::BLOCKS : a.epilogue.gated ? 2 : 1;
  const int64_t all = (a.outputs + COLUMNS - 1) / COLUMNS, panels = (all + width - 1) / width;
  share_out(panels * ranges, a.threads, [&](int64_t i) {
    const int64_t block = i % panels * width, blocks = all - block < width ? all - block : width, range = i / panels;
    const int64_t first = groups * range / ranges * GROUP, end = groups * (range + 1) / ranges * GROUP;
    const int64_t rows = (end < a.rows ? end : a.rows) - first;
    const int64_t size = Panel<Source>::height(rows) * COLUMNS;
    Scratch memory = arena(room<float>(blocks * size) + scratch);
    float *sums = memory.take<float>(blocks * size);
    Source weights = source(block, first, memory);
    const bf16 *x = static_cast<const bf16 *>(a.x) + first * a.x_stride;
    const Panel<Source> panel(x, a.x_stride, rows, weights, blocks, a.inputs, sums);
    panel.run([&](int64_t b, int64_t from, int64_t to, const float *own) {
      const int64_t column = (block + b) * COLUMNS;
      if (!a.epilogue.gated) return write<bf16>(a, column, first + from, first + to, own);
      if (b % 2) write_gated<bf16>(a, (column - COLUMNS) / 2, first + from, first + to, own - size, own);
    });
  });
}

}  // namespace headrace::HEADRACE_NS

#endif
