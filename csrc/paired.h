// Attention of lanes over one chunk whose keys and values are bf16 pairs, for AVX-512 BF16.
//
// K [D/2][64][2] and V [32][D][2]: the two halves of a pair lie together, so that one instruction multiplies and adds both
// for 16 keys or 16 output elements. D is a multiple of 16.
#pragma once

#include "lanes.h"
#include "pairs.h"

namespace headrace::HEADRACE_NS {

constexpr bool paired(int64_t dim) {
#ifdef __AVX512BF16__
  return dim % 16 == 0;
#else
  return dim < 0;
#endif
}

#ifdef __AVX512BF16__

struct Paired {
  static constexpr float LOG2_E = 1.44269504f;
  using Type = bf16;
  using Query = bf16;
  using Probability = bf16;
  const bf16 *k, *v;
  int64_t dim, ahead;
  int lines;  // cache lines of the next chunk that each step of the first tiles fetches

  static int64_t scratch(int64_t) { return 0; }
  static void query(const bf16 *from, bf16 *to, int64_t n) { memcpy(to, from, n * sizeof(bf16)); }

  Paired(const bf16 *k, const bf16 *v, int64_t dim, int64_t, int64_t ahead, int64_t lanes, float *)
      : k(k), v(v), dim(dim), ahead(ahead), lines(ahead == 0 ? 0 : lanes > TILE_ROWS ? 1 : 4) {}

  // p[lane][j] = sum over d of q[lane][d] * k[d][j]
  void scores(int n, const bf16 *q, float *p, bool fetch) const {
    for (int r = 0; r < n; r += TILE_ROWS) {
      const bf16 *next = k + ahead + (lines == 1 ? r / TILE_ROWS * 32 : 0);
      score_rows(n - r, fetch ? lines : 0, q + r * dim, next, p + r * CHUNK);
    }
  }

  void score_rows(int n, int fetch, const bf16 *q, const bf16 *next, float *p) const {
    switch (n) {
      case 1: return score_fetching<1>(fetch, q, next, p);
      case 2: return score_fetching<2>(fetch, q, next, p);
      case 3: return score_fetching<3>(fetch, q, next, p);
      default: return score_fetching<4>(fetch, q, next, p);
    }
  }

  template <int R> void score_fetching(int fetch, const bf16 *q, const bf16 *next, float *p) const {
    if (fetch == 4) score_tile<R, 4>(q, next, p);
    else if (fetch == 1) score_tile<R, 1>(q, next, p);
    else score_tile<R, 0>(q, next, p);
  }

  template <int R, int LINES> void score_tile(const bf16 *q, const bf16 *next, float *p) const {
    __m512 sum[R][4] = {};
    pair_steps<R, 4, LINES>(q, dim, k, 2 * CHUNK, dim / 2, next, sum);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 4; ++c) _mm512_store_ps(p + r * CHUNK + c * 16, sum[r][c]);
  }

  // 2^x for x <= 0: at most 3 ulp from the truth; about 1e-38 for all x below -126.
  static __m512 exp2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // the second operand wins where it is NaN
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(1.3333558e-3f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
  }

  // Weights of the fold: 0 for what was EMPTY.
  static vf power(vf x) {
    const __m512 y = exp2(x);
    return x == splat(-__builtin_inff()) ? vf{} : y;
  }

  // Raw scores s [n, 64] -> probabilities p [n, 64] relative to each lane's own maximum m (in units of log 2), rounded to
  // bf16, 0 where the lane sees nothing; l [n] is the sum of the unrounded ones, 0 when no visible score is above -inf.
  // Two passes, so that the lanes' chains of operations overlap.
  // `weights` [64] is what they are multiplied by before they are rounded, but not in the sum.
  static void probabilities(int n, float *s, const Seen &seen, float scale, bf16 *p, float *m, float *l,
                            const float *weights = nullptr) {
    const __m512 factor = _mm512_set1_ps(scale * LOG2_E);
    for (int r = 0; r < n; ++r) {
      const float *row = s + r * CHUNK;
      if (!seen.everything) hide(s + r * CHUNK, seen.mask(r));
      const __m512 top = _mm512_max_ps(_mm512_max_ps(_mm512_load_ps(row), _mm512_load_ps(row + 16)),
                                       _mm512_max_ps(_mm512_load_ps(row + 32), _mm512_load_ps(row + 48)));
      m[r] = _mm512_reduce_max_ps(_mm512_mul_ps(top, factor));
      m[r] = m[r] == -__builtin_inff() ? 0.0f : m[r];
    }
    for (int r = 0; r < n; ++r) {
      const __m512 base = _mm512_set1_ps(m[r]);
      __m512 x[4];
      for (int c = 0; c < 4; ++c) x[c] = exp2(_mm512_fmsub_ps(_mm512_load_ps(s + r * CHUNK + c * 16), factor, base));
      if (!seen.everything)
        for (int c = 0; c < 4; ++c) x[c] = _mm512_maskz_mov_ps(seen.mask(r) >> (16 * c), x[c]);
      l[r] = sum16(_mm512_add_ps(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), x[2]), x[3]));
      if (weights)
        for (int c = 0; c < 4; ++c)
          x[c] = _mm512_maskz_mul_ps(seen.mask(r) >> (16 * c), x[c], _mm512_loadu_ps(weights + c * 16));
      _mm512_store_si512(p + r * CHUNK, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
      _mm512_store_si512(p + r * CHUNK + 32, (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]));
    }
  }

  static __m512i half_mask(int halves) {
    return _mm512_set1_epi32((halves & 1 ? 0xffff : 0) | (halves & 2 ? 0xffff0000 : 0));
  }

  static void hide(float *s, uint64_t mask) {
    const __m512 low = _mm512_set1_ps(-__builtin_inff());
    for (int c = 0; c < 4; ++c)
      _mm512_store_ps(s + c * 16, _mm512_mask_mov_ps(low, mask >> (16 * c), _mm512_load_ps(s + c * 16)));
  }

  // acc[lane] = acc[lane] * keep + take * (sum over visible keys of p[lane][j] * v[j]).
  void values(int n, const bf16 *p, const Seen &seen, float *acc, const Weights &w, bool fetch) const {
    for (int r = 0; r < n; r += TILE_ROWS) {
      const int rows = n - r < TILE_ROWS ? n - r : TILE_ROWS;
      Range range{seen.everything ? ~0ull : 0, fetch ? lines : 0, lines == 1 ? r / TILE_ROWS * 32 : 0};
      if (!seen.everything)
        for (int i = r; i < r + rows; ++i) range.keys |= seen.mask(i);
      if (range.keys) value_rows(rows, p + r * CHUNK, range, acc + r * dim, w, r);
    }
  }

  // The keys that some lane of a tile sees, as bits; and what to fetch meanwhile.
  struct Range {
    uint64_t keys;
    int lines, line;
  };

  void value_rows(int n, const bf16 *p, Range range, float *acc, const Weights &w, int lane) const {
    switch (n) {
      case 1: return value_columns<1>(p, range, acc, w, lane);
      case 2: return value_columns<2>(p, range, acc, w, lane);
      case 3: return value_columns<3>(p, range, acc, w, lane);
      default: return value_columns<4>(p, range, acc, w, lane);
    }
  }

  template <int R> void value_columns(const bf16 *p, Range range, float *acc, const Weights &w, int lane) const {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) {
      if (range.lines == 4) value_tile<R, 4, 4>(p, range, d, acc, w, lane);
      else if (range.lines == 1) value_tile<R, 4, 1>(p, range, d, acc, w, lane);
      else value_tile<R, 4, 0>(p, range, d, acc, w, lane);
    }
    for (; d + 32 <= dim; d += 32)
      range.lines ? value_tile<R, 2, 2>(p, range, d, acc, w, lane) : value_tile<R, 2, 0>(p, range, d, acc, w, lane);
    for (; d < dim; d += 16)
      range.lines ? value_tile<R, 1, 1>(p, range, d, acc, w, lane) : value_tile<R, 1, 0>(p, range, d, acc, w, lane);
  }

  // Output elements d .. d + 16 C - 1. A key that no lane sees is left out or, in a pair with one that is seen, masked:
  // its value may be garbage, and 0 times NaN is NaN. Leaving out a probability of 0 changes no bit.
  template <int R, int C, int LINES>
  void value_tile(const bf16 *p, Range range, int64_t d, float *acc, const Weights &w, int lane) const {
    __m512 sum[R][C] = {};
    const bf16 *from = v + 2 * d;
    if (range.keys == ~0ull)
      pair_steps<R, C, LINES>(p, CHUNK, from, 2 * dim, CHUNK / 2, from + ahead + range.line, sum);
    else
      for (int pair = 0; pair < CHUNK / 2; ++pair) {
        const int halves = range.keys >> (2 * pair) & 3;
        if (halves) pair_step<R, C>(p + 2 * pair, CHUNK, from + pair * 2 * dim, half_mask(halves), sum);
      }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) {
        float *at = acc + r * dim + d + c * 16;
        const __m512 kept = _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(w.keep[lane + r]));
        _mm512_store_ps(at, _mm512_fmadd_ps(sum[r][c], _mm512_set1_ps(w.take[lane + r]), kept));
      }
  }
};

#endif

}  // namespace headrace::HEADRACE_NS
