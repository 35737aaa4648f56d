// Products of bf16 pairs, the work of AVX-512 BF16: sums[r][c] += x[r][2i] * w[i][c][0] + x[r][2i+1] * w[i][c][1].
//
// Every sum is one chain over ascending pairs, whatever the tile: a row's bits do not depend on its neighbours.
#pragma once

#ifdef __AVX512BF16__

#include "isa/fetch.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

constexpr int TILE_ROWS = 4;  // with four vectors of sums side by side they fill half the registers
constexpr int MOST_ROWS = 6;  // of a tile: as many as registers hold
constexpr int LINE = 32;      // bf16 in a cache line

// Tiles of TILE_ROWS rows, some of which take one or two of those that are left: a row takes hardly longer in a tile of five or
// six than in one of four, but clearly longer in a smaller one.
constexpr int tiles_of(int64_t rows) {
  const int64_t least = (rows + MOST_ROWS - 1) / MOST_ROWS, whole = rows / TILE_ROWS;
  return static_cast<int>(whole > least ? whole : least);
}

struct Tiling {
  int rows, tiles;

  explicit Tiling(int64_t rows) : Tiling(rows, tiles_of(rows)) {}
  Tiling(int64_t rows, int tiles) : rows(static_cast<int>(rows)), tiles(tiles) {}
  int first(int tile) const { return rows * tile / tiles; }  // row of the tile; its last one is before first(tile + 1)
};

// f(Constant<rows>) for 1 .. MOST rows, four or more.
template <int MOST = MOST_ROWS, typename F> HEADRACE_INLINE void with_tile_rows(int rows, F f) {
  switch (rows) {
    case 1: return f(Constant<1>{});
    case 2: return f(Constant<2>{});
    case 3: return f(Constant<3>{});
    case 4: return f(Constant<4>{});
    case 5: return f(Constant<(MOST < 5 ? MOST : 5)>{});
    default: return f(Constant<MOST>{});
  }
}

// Fetches LINES cache lines to L1, and asks for those twelve lines behind them: each is asked for twice if a reader comes by
// line after line. A core reads a sixth more then than when asked once.
template <int LINES> HEADRACE_INLINE void fetch_twice(const void *from) {
  fetch_lines<LINES>(static_cast<const bf16 *>(from) + 12 * LINE);
  fetch_lines<LINES>(static_cast<const bf16 *>(from));
}

HEADRACE_INLINE __m512bh splat_pair(const bf16 *x) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

template <int R, int C> HEADRACE_INLINE void clear(__m512 (&sum)[R][C]) {
  HEADRACE_EACH(r, R, HEADRACE_EACH(c, C, sum[r][c] = _mm512_setzero_ps()));
}

// One pair of each row with 16 C columns of weights.
template <int R, int C>
HEADRACE_INLINE void multiply(const bf16 *x, int64_t x_stride, const __m512bh (&weight)[C], __m512 (&sum)[R][C]) {
  HEADRACE_EACH(r, R, {
    const __m512bh input = splat_pair(x + r * x_stride);
    HEADRACE_EACH(c, C, sum[r][c] = _mm512_dpbf16_ps(sum[r][c], input, weight[c]));
  });
}

// The same with weights of which `keep` masks the halves.
template <int R, int C>
HEADRACE_INLINE void pair_step(const bf16 *x, int64_t x_stride, const bf16 *w, __m512i keep, __m512 (&sum)[R][C]) {
  __m512bh weight[C];
  HEADRACE_EACH(c, C, { weight[c] = (__m512bh)_mm512_and_si512(_mm512_loadu_si512(w + c * 32), keep); });
  multiply<R, C>(x, x_stride, weight, sum);
}

// What comes next in memory and is fetched meanwhile: `lines` cache lines in each step, from `stride` elements farther on
// than in the step before.
struct Ahead {
  const bf16 *from;
  int64_t stride;
  int lines;
};

// `pairs` pairs, and fetch(from, lines) in each.
// (Not unrolled: the processor's own fetching of strides goes by the address of the load instruction.)
template <int R, int C, typename F>
HEADRACE_INLINE void fetching_steps(const bf16 *x, int64_t x_stride, const bf16 *w, int64_t w_stride, int64_t pairs,
                                    Ahead ahead, __m512 (&sum)[R][C], F fetch) {
  for (int64_t i = 0; i < pairs; ++i, x += 2, w += w_stride, ahead.from += ahead.stride) {
    fetch(ahead.from);
    __m512bh weight[C];
    HEADRACE_EACH(c, C, weight[c] = (__m512bh)_mm512_loadu_si512(w + c * 32));
    multiply<R, C>(x, x_stride, weight, sum);
  }
}

// The same, fetching LINES lines, or as many as `ahead` says (SOME), to where there is room. ONCE: nobody reads these lines a
// second time, so they need not stay in L2.
template <int R, int C, int LINES, bool ONCE>
HEADRACE_INLINE void pair_steps(const bf16 *x, int64_t x_stride, const bf16 *w, int64_t w_stride, int64_t pairs, Ahead ahead,
                                __m512 (&sum)[R][C]) {
  const auto steps = [&](auto fetch)
                         HEADRACE_ALWAYS_INLINE { fetching_steps(x, x_stride, w, w_stride, pairs, ahead, sum, fetch); };
  if constexpr (LINES == SOME) {
    const bool to_l2 = small_l1;
    const int lines = ahead.lines;
    steps([=](const bf16 *from) HEADRACE_ALWAYS_INLINE { fetch_some(from, lines, to_l2); });
  } else if (LINES > 0 && small_l1) {
    steps([](const bf16 *from) HEADRACE_ALWAYS_INLINE { fetch_lines<LINES, TO_L2>(from); });
  } else {
    steps([](const bf16 *from) HEADRACE_ALWAYS_INLINE { fetch_lines<LINES, ONCE ? TO_L1_ALONE : TO_L1>(from); });
  }
}

// The last LAST pairs, row by row, and finish(row) for each row as soon as its sums are whole.
template <int LAST, int R, int C, int LINES, typename F>
HEADRACE_INLINE void last_steps(const bf16 *x, int64_t x_stride, const bf16 *w, int64_t w_stride, Ahead ahead,
                                __m512 (&sum)[R][C], F finish) {
  __m512bh weight[LAST][C];
  HEADRACE_EACH(i, LAST, {
    fetch_near<LINES>(ahead.from + i * ahead.stride, ahead.lines);
    HEADRACE_EACH(c, C, { weight[i][c] = (__m512bh)_mm512_loadu_si512(w + i * w_stride + c * 32); });
  });
  HEADRACE_EACH(r, R, {
    HEADRACE_EACH(i, LAST, {
      const __m512bh input = splat_pair(x + r * x_stride + 2 * i);
      HEADRACE_EACH(c, C, sum[r][c] = _mm512_dpbf16_ps(sum[r][c], input, weight[i][c]));
    });
    finish(Constant<r>{});
  });
}

// f(Constant<L>): how many lines R rows fetch in each of their steps. Few rows wait for memory, so L is `lines`, rounded up to
// 0, 1, 2, 4 .. MOST. Tiles for each of these take long to compile, and more rows have the time to ask: SOME.
template <int R, int MOST, typename F> HEADRACE_INLINE void with_step_lines(int lines, F f) {
  if constexpr (R > 2) f(Constant<SOME>{});
  else with_lines<MOST>(lines, f);
}

// pair_steps, then finish(row) for each row. Sixteen stores in one go would keep the multipliers waiting for some 40 cycles:
// the last pairs of many rows are multiplied row by row, while the row before is stored. (Not where memory is what is waited
// for: ONCE.)
template <int R, int C, int LINES, bool ONCE, typename F>
HEADRACE_INLINE void finished_steps(const bf16 *x, int64_t x_stride, const bf16 *w, int64_t w_stride, int64_t pairs,
                                    Ahead ahead, __m512 (&sum)[R][C], F finish) {
  constexpr int LAST = R > 2 && !ONCE ? 2 : 0;
  const int64_t steps = pairs < LAST ? pairs : pairs - LAST;
  pair_steps<R, C, LINES, ONCE>(x, x_stride, w, w_stride, steps, ahead, sum);
  if constexpr (LAST > 0)
    if (steps < pairs) {
      ahead.from += steps * ahead.stride;
      return last_steps<LAST, R, C, LINES>(x + 2 * steps, x_stride, w + steps * w_stride, w_stride, ahead, sum, finish);
    }
  each<R>(finish);
}

// Vectors folded to one number each by halves: element i with i + 8, then i + 4, i + 2, i + 1, the same bits for 1, 4 and
// 16 at once. The first two steps of N (1 or 4): what is left of vector b is the four elements from 4 b on.
template <int N, typename F> HEADRACE_INLINE __m512 to_fours(const __m512 (&x)[N], F f) {
  auto halves = [&](__m512 a, __m512 b, auto low, auto high) HEADRACE_ALWAYS_INLINE {
    return (__m512)f((vf)_mm512_shuffle_f32x4(a, b, low), (vf)_mm512_shuffle_f32x4(a, b, high));
  };
  const Constant<0x44> front;
  const Constant<0xee> back;
  const __m512 eights[2] = {halves(x[0], x[N / 4], front, back), halves(x[N / 2], x[N - 1], front, back)};
  return halves(eights[0], eights[1], Constant<0x88>{}, Constant<0xdd>{});
}

// The other two: vector b's number is element b of the result,
template <typename F> HEADRACE_INLINE vf from_fours(const __m512 (&fours)[1], F f) {
  const __m512 twos = (__m512)f((vf)fours[0], (vf)_mm512_permute_ps(fours[0], 0x0e));
  const __m512 ones = (__m512)f((vf)twos, (vf)_mm512_permute_ps(twos, 0x01));
  return (vf)_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), ones);
}

// or, of four fours, 4 b + j for vector b of the j-th.
template <typename F> HEADRACE_INLINE vf from_fours(const __m512 (&fours)[4], F f) {
  auto halves = [&](__m512 a, __m512 b, auto low, auto high) HEADRACE_ALWAYS_INLINE {
    return (__m512)f((vf)_mm512_shuffle_ps(a, b, low), (vf)_mm512_shuffle_ps(a, b, high));
  };
  const Constant<0x44> front;
  const Constant<0xee> back;
  const __m512 twos[2] = {halves(fours[0], fours[1], front, back), halves(fours[2], fours[3], front, back)};
  return (vf)halves(twos[0], twos[1], Constant<0x88>{}, Constant<0xdd>{});
}

}  // namespace headrace::HEADRACE_NS

#endif
