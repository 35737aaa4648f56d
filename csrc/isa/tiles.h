// Products of bf16 by tiles, the work of AMX: sums[R][16] += x[R][32] . w[16][16][2], R <= 16 rows and 16 pairs of inputs.
//
// One instruction adds up the products of the pairs' first and of their second inputs apart, each in ascending order, then
// both to what was there. So an element depends on its row, its column and on where the steps of 32 inputs begin, which is
// at multiples of 32 everywhere: not on the row's neighbours, nor on how many there are.
#pragma once

#ifdef __AMX_BF16__

#include "isa/pairs.h"

namespace headrace::HEADRACE_NS {

constexpr int TILE = 16;         // rows and columns of a tile of sums
constexpr int STEP_INPUTS = 32;  // inputs that a tile of x holds

// The eight tiles of this thread, from here to the end of the scope. 0 to 3 hold sums, 4 and 5 x, 6 and 7 weights. The
// processor renames them: nothing waits for a tile that is about to be overwritten.
class Tiles {
 public:
  ~Tiles() { _tile_release(); }

  // `rows` rows of x and of sums from here on, in tiles 2, 3 and 5 `below` of them, of so many inputs; what the tiles held is
  // lost if that is a change. What was written to memory is there before tiles are read: GCC 12 does not know that loading a
  // tile reads it.
  void take(int rows, int below, int inputs) {
    asm volatile("" ::: "memory");
    if (rows == taken && below == taken_below && inputs == taken_inputs) return;
    taken = rows;
    taken_below = below;
    taken_inputs = inputs;
    struct alignas(64) Shape {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; ++i) {
      shape.bytes[i] = i == 4 || i == 5 ? 2 * inputs : 4 * TILE;
      shape.rows[i] = i >= 6 ? inputs / 2 : i == 2 || i == 3 || i == 5 ? below : rows;
    }
    asm volatile("" ::"r"(&shape) : "memory");  // nor that this reads more than eight bytes
    _tile_loadconfig(&shape);
  }

  void take(int rows, int below) { take(rows, below, STEP_INPUTS); }
  void take(int rows) { take(rows, rows); }

 private:
  int taken = 0, taken_below = 0, taken_inputs = 0;
};

HEADRACE_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Fetches LINES cache lines to L1, each asked for twice; of each four in memory the first OF_FOUR, 2 or 4. A loop of its own,
// in one place and not unrolled: the processor's own fetching goes by an instruction's address, and reads less when asked by
// sixty-four instructions. (Without the asm GCC sees a function that does nothing, and leaves out its calls.)
template <int LINES, int OF_FOUR = 4> HEADRACE_APART inline void pull_lines(const void *first) {
  auto from = static_cast<const bf16 *>(first);
#pragma GCC unroll 1
  for (int line = 0; line < LINES; ++line, from += LINE) {
    fetch_twice<1>(from);
    if (OF_FOUR == 2 && line % 2) from += 2 * LINE;
    asm volatile("");
  }
}

// The sums 0 to 3, or 0 and 1 if TILES are 2, side by side [R][64], += x[R][32 steps] . w[16 steps][64][2]; rows of weights are
// w_stride elements apart. Each step fetches LINES cache lines from ahead.from on (see pull_lines), half of them before its
// first tile of weights, asked for TWICE or once.
template <int LINES, bool TWICE = true, int TILES = 4, int OF_FOUR = 4>
HEADRACE_INLINE void tile_steps(const bf16 *x, int64_t x_stride, const bf16 *w, int64_t w_stride, int64_t steps, Ahead ahead) {
  constexpr auto fetch = TWICE && LINES > 0 ? pull_lines<LINES / 2, OF_FOUR> : fetch_lines<LINES / 2>;
  for (int64_t i = 0; i < steps; ++i, x += STEP_INPUTS, w += TILE * w_stride, ahead.from += ahead.stride) {
    fetch(ahead.from);
    _tile_loadd(4, x, 2 * x_stride);
    _tile_loadd(6, w, 2 * w_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + LINE, 2 * w_stride);
    _tile_dpbf16ps(1, 4, 7);
    fetch(ahead.from + LINES / 2 * LINE * 4 / OF_FOUR);
    if constexpr (TILES < 4) continue;
    _tile_loadd(6, w + 2 * LINE, 2 * w_stride);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, w + 3 * LINE, 2 * w_stride);
    _tile_dpbf16ps(3, 4, 7);
  }
}

// The same for 32 rows and half the columns: sums 0 and 1 of the first 16, 2 and 3 of the others. fetch(i) in each step.
template <typename F>
HEADRACE_INLINE void square_steps(const bf16 *x, int64_t x_stride, const bf16 *w, int64_t w_stride, int64_t steps, F fetch) {
  const bf16 *below = x + TILE * x_stride;
  for (int64_t i = 0; i < steps; ++i, x += STEP_INPUTS, below += STEP_INPUTS, w += TILE * w_stride) {
    _tile_loadd(4, x, 2 * x_stride);
    _tile_loadd(6, w, 2 * w_stride);
    _tile_dpbf16ps(0, 4, 6);
    fetch(i);
    _tile_loadd(7, w + LINE, 2 * w_stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, below, 2 * x_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Each step fetches LINES cache lines from ahead.from on, to L2: two blocks of weights do not fit into L1.
template <int LINES>
HEADRACE_INLINE void square_steps(const bf16 *x, int64_t x_stride, const bf16 *w, int64_t w_stride, int64_t steps,
                                  Ahead ahead) {
  square_steps(x, x_stride, w, w_stride, steps, [&](int64_t) HEADRACE_ALWAYS_INLINE {
    fetch_lines<LINES, TO_L2>(ahead.from);
    ahead.from += ahead.stride;
  });
}

// Sums to and from memory [.., stride], the first TILES (4 or 2) of a row. GCC 12 knows of neither that memory is read or
// written.
template <int TILES = 4> HEADRACE_INLINE void load_row(const float *from, int64_t stride) {
  asm volatile("" ::: "memory");
  _tile_loadd(0, from, 4 * stride);
  _tile_loadd(1, from + 16, 4 * stride);
  if constexpr (TILES < 4) return;
  _tile_loadd(2, from + 32, 4 * stride);
  _tile_loadd(3, from + 48, 4 * stride);
}

template <int TILES = 4> HEADRACE_INLINE void store_row(float *to, int64_t stride) {
  _tile_stored(0, to, 4 * stride);
  _tile_stored(1, to + 16, 4 * stride);
  if constexpr (TILES == 4) {
    _tile_stored(2, to + 32, 4 * stride);
    _tile_stored(3, to + 48, 4 * stride);
  }
  asm volatile("" ::: "memory");
}

HEADRACE_INLINE void load_square(const float *from, int64_t stride) {
  asm volatile("" ::: "memory");
  _tile_loadd(0, from, 4 * stride);
  _tile_loadd(1, from + 16, 4 * stride);
  _tile_loadd(2, from + TILE * stride, 4 * stride);
  _tile_loadd(3, from + TILE * stride + 16, 4 * stride);
}

HEADRACE_INLINE void store_square(float *to, int64_t stride) {
  _tile_stored(0, to, 4 * stride);
  _tile_stored(1, to + 16, 4 * stride);
  _tile_stored(2, to + TILE * stride, 4 * stride);
  _tile_stored(3, to + TILE * stride + 16, 4 * stride);
  asm volatile("" ::: "memory");
}

// sums [rows, 64] = x[rows][32 steps] . w[16 steps][64][2], fetching meanwhile what follows the weights in memory.
class TileProduct {
 public:
  TileProduct(const bf16 *x, int64_t x_stride, int64_t rows, const bf16 *w, int64_t steps, float *sums, Tiles &tiles)
      : x(x), x_stride(x_stride), rows(rows), w(w), steps(steps), sums(sums) {
    tiles.take(rows < TILE ? rows : TILE);
  }

  void run() const { rows <= TILE ? strip<64, true>(0, 0, steps, sums) : groups(); }

 private:
  const bf16 *x;
  int64_t x_stride, rows;
  const bf16 *w;
  int64_t steps;
  float *sums;

  static constexpr int64_t STEP = 2 * 64 * TILE;  // elements of a step's weights
  static constexpr int64_t NEAR = STEP / 2;       // elements that a strip fetches ahead: two steps read a tenth less

  // Few groups of 16 rows: they meet two steps of weights at a time, which the first of them brings to L1.
  // (Asking for lines twice makes 32 rows up to 6 % slower.)
  HEADRACE_APART void groups() const {
    alignas(64) float last[TILE * 64];  // of the last 16 rows, if some of them are in the group before too
    const int64_t full = rows / TILE * TILE;
    for (int64_t k = 0; k < steps; k += 2) {
      const int64_t count = steps - k < 2 ? 1 : 2;
      strip<64, false>(0, k, count, sums);
      for (int64_t row = TILE; row < full; row += TILE) strip<0, false>(row, k, count, sums + row * 64);
      if (full < rows) strip<0, false>(rows - TILE, k, count, last);
    }
    if (full < rows) memcpy(sums + full * 64, last + (TILE + full - rows) * 64, (rows - full) * 64 * sizeof(float));
  }

  // One group of rows by `count` steps from k on: to [16, 64], what is there being added to unless k is 0.
  template <int LINES, bool TWICE> HEADRACE_APART void strip(int64_t row, int64_t k, int64_t count, float *to) const {
    const bf16 *from = w + k * STEP;
    k > 0 ? load_row(to, 64) : clear_sums();
    tile_steps<LINES, TWICE>(x + row * x_stride + k * STEP_INPUTS, x_stride, from, 128, count, {from + NEAR, STEP, 0});
    store_row(to, 64);
  }
};

}  // namespace headrace::HEADRACE_NS

#endif
