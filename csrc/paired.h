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
  static constexpr bool RUNNING = false;
  static constexpr int BATCH = 1, TOGETHER = LANES;
  static constexpr int64_t SOON = 2048;  // elements that a stream fetches ahead
  using Type = bf16;
  using Space = headrace::HEADRACE_NS::Space;
  using Query = bf16;
  using Probability = bf16;
  const bf16 *k, *v;
  int64_t dim;
  int64_t ahead;  // elements from these keys to those that are read next; 0: none
  int64_t lanes;  // that meet the chunk; 0: nothing is to be fetched meanwhile

  static int64_t scratch(int64_t) { return 0; }
  static void query(const bf16 *from, bf16 *to, int64_t n) { memcpy(to, from, n * sizeof(bf16)); }

  Paired(const bf16 *k, const bf16 *v, int64_t dim, int64_t, int64_t ahead, int64_t lanes, const Space &)
      : k(k), v(v), dim(dim), ahead(ahead), lanes(lanes) {}

  // Keys and values that lie in a cache already.
  Paired(const bf16 *k, const bf16 *v, int64_t dim) : k(k), v(v), dim(dim), ahead(0), lanes(0) {}

  // One group of lanes reads K, then V, and L1 holds little more than both: fetch half a chunk ahead. Several groups read
  // them in turn: fetch a whole chunk ahead.
  bool one_group() const { return lanes <= LANES; }
  const bf16 *during_scores() const { return one_group() ? v : ahead ? k + ahead : nullptr; }
  const bf16 *during_values() const { return !ahead ? nullptr : one_group() ? k + ahead : v + ahead; }

  // Few lanes wait for memory, which answers soonest when it is asked in the order in which things lie: two rows go together
  // through whole rows of values, as fast as four through half of them. More lanes would read the values too often.
  int value_rows_together() const { return lanes > 0 && lanes <= 2 * TILE_ROWS && dim % 128 == 0 ? 2 : TILE_ROWS; }

  // Where L1 is small, one or two lanes fetch what they read a little later themselves: so close behind, the processor's own
  // fetching helps. Only if what is read then lies behind these keys and values, as it does but for the last head of a unit.
  bool streams() const { return small_l1 && lanes > 0 && lanes <= 2 && ahead == CHUNK * dim; }

  // That, for C columns from `here` on of rows that are `stride` elements apart.
  static Ahead later(const bf16 *here, int64_t stride, int columns) {
    const int64_t rows = SOON > stride ? SOON / stride : 1;
    return {here + rows * stride, stride, columns};
  }

  Ahead fetched_by_scores(int64_t lane) const {
    return streams() ? later(k, 2 * CHUNK, 4) : share(during_scores(), lane, TILE_ROWS, 0, 4);
  }

  Ahead fetched_by_values(int64_t lane, int64_t d, int columns) const {
    return streams() ? later(v + 2 * d, 2 * dim, columns) : share(during_values(), lane, value_rows_together(), d, columns);
  }

  // The part of `next` that lanes from `lane` on, `rows` together, fetch while they take 16 `columns` columns a step, from
  // column d on.
  Ahead share(const bf16 *next, int64_t lane, int rows, int64_t d, int columns) const {
    if (!next || lanes == 0) return {k, 0, 0};
    const int64_t parts = (lanes + rows - 1) / rows, stride = (LINE * columns + parts - 1) / parts;
    return {next + (lane / rows * dim + d) * CHUNK / parts, stride, static_cast<int>((stride + LINE - 1) / LINE)};
  }

  // Whether R rows that take C columns and fetch LINES lines a step are a single lane, which fetches all: nobody else
  // reads them. (Four lanes gain nothing by it.)
  template <int R, int C, int LINES> static constexpr bool once = R == 1 && LINES == C;

  // p[lane][j] = sum over d of q[lane][d] * k[d][j]
  void scores(int n, const bf16 *q, float *p, int64_t before) const {
    for (int r = 0; r < n; r += TILE_ROWS)
      score_rows(n - r, q + r * dim, fetched_by_scores(before + r), p + r * CHUNK);
  }

  void score_rows(int n, const bf16 *q, Ahead next, float *p) const {
    with_lines<4>(next.lines, [&](auto lines) {
      switch (n) {
        case 1: return score_tile<1, lines>(q, next, p);
        case 2: return score_tile<2, lines>(q, next, p);
        case 3: return score_tile<3, lines>(q, next, p);
        default: return score_tile<4, lines>(q, next, p);
      }
    });
  }

  template <int R, int LINES> HEADRACE_APART void score_tile(const bf16 *q, Ahead next, float *p) const {
    __m512 sum[R][4];
    clear(sum);
    pair_steps<R, 4, LINES, once<R, 4, LINES>>(q, dim, k, 2 * CHUNK, dim / 2, next, sum);
    store_scores(sum, p);
  }

  template <int R> static HEADRACE_ALWAYS_INLINE void store_scores(const __m512 (&sum)[R][4], float *p) {
    each<4 * R>([&](auto i) HEADRACE_ALWAYS_INLINE {
      _mm512_store_ps(p + i / 4 * CHUNK + i % 4 * 16, sum[i / 4][i % 4]);
    });
  }

  // 2^x for x <= 0; about 1e-38 for all x below -126. FINE: at most 3 ulp from the truth, for states, which are folded in
  // other orders too. Otherwise 3e-6 of it, for probabilities, which are rounded to 8 bits.
  template <bool FINE> static __m512 exp2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // the second operand wins where it is NaN
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    auto horner = [&](float first, auto... coefficients) HEADRACE_ALWAYS_INLINE {
      __m512 y = _mm512_set1_ps(first);
      ((y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(coefficients))), ...);
      return y;
    };
    const __m512 y = FINE ? horner(1.3202860e-3f, 9.6749528e-3f, 5.5510478e-2f, 2.4022166e-1f, 6.9314660e-1f, 1.0f)
                          : horner(9.5827006e-3f, 5.5906877e-2f, 2.4024104e-1f, 6.9312411e-1f, 1.0f);
    return _mm512_scalef_ps(y, n);
  }

  // Weights of the fold: 0 for what was EMPTY.
  static vf power(vf x) {
    const __m512 y = exp2<true>(x);
    return x == splat(-__builtin_inff()) ? vf{} : y;
  }

  // Raw scores s [n, 64] -> probabilities p [n, 64] relative to each lane's own maximum m (in units of log 2), rounded to
  // bf16, 0 where the lane sees nothing; l [n] is the sum of the unrounded ones, 0 when no visible score is above -inf.
  // Two passes, so that the lanes' chains of operations overlap.
  // `weights` [64] is what they are multiplied by before they are rounded, but not in the sum.
  static void probabilities(int n, float *s, const Seen &seen, float scale, bf16 *p, float *m, float *l,
                            const float *weights = nullptr) {
    const __m512 factor = _mm512_set1_ps(scale * LOG2_E);
    if (!seen.everything)
      for (int r = 0; r < n; ++r) hide(s + r * CHUNK, seen.mask(r));
    int r = 0;
    for (; r + 4 <= n; r += 4) maxima<4>(s + r * CHUNK, factor, m + r);
    for (; r < n; ++r) maxima<1>(s + r * CHUNK, factor, m + r);
    for (r = 0; r + 4 <= n; r += 4) powers<4>(s + r * CHUNK, seen, r, factor, m + r, p + r * CHUNK, l + r, weights);
    for (; r < n; ++r) powers<1>(s + r * CHUNK, seen, r, factor, m + r, p + r * CHUNK, l + r, weights);
  }

  // m: the greatest scaled score of each of N lanes, 0 for a lane whose scores are all -inf.
  template <int N> static void maxima(const float *s, __m512 factor, float *m) {
    __m512 top[N];
    each<N>([&](auto r) HEADRACE_ALWAYS_INLINE {
      const float *row = s + r * CHUNK;
      const __m512 most = _mm512_max_ps(_mm512_max_ps(_mm512_load_ps(row), _mm512_load_ps(row + 16)),
                                        _mm512_max_ps(_mm512_load_ps(row + 32), _mm512_load_ps(row + 48)));
      top[r] = _mm512_mul_ps(most, factor);
    });
    const vf most = reduce<N>(top, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return max(a, b); });
    store_part(m, most == splat(-__builtin_inff()) ? vf{} : most, N);
  }

  // p and l of N lanes, the first of which is number `lane` of the group.
  template <int N>
  static void powers(const float *s, const Seen &seen, int lane, __m512 factor, const float *m, bf16 *p, float *l,
                     const float *weights) {
    __m512 sum[N];
    each<N>([&](auto r) HEADRACE_ALWAYS_INLINE {
      const __m512 base = _mm512_set1_ps(m[r]);
      __m512 x[4];
      each<4>([&](auto c) HEADRACE_ALWAYS_INLINE {
        x[c] = exp2<false>(_mm512_fmsub_ps(_mm512_load_ps(s + r * CHUNK + c * 16), factor, base));
      });
      if (!seen.everything) keep_seen(seen.mask(lane + r), x);
      sum[r] = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), x[2]), x[3]);
      if (weights) weigh(seen.mask(lane + r), weights, x);
      _mm512_store_si512(p + r * CHUNK, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
      _mm512_store_si512(p + r * CHUNK + 32, (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]));
    });
    store_part(l, reduce<N>(sum, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return a + b; }), N);
  }

  // x, 0 for the keys that are not in `mask`.
  static HEADRACE_ALWAYS_INLINE void keep_seen(uint64_t mask, __m512 (&x)[4]) {
    each<4>([&](auto c) HEADRACE_ALWAYS_INLINE {
      x[c] = _mm512_maskz_mov_ps(static_cast<__mmask16>(mask >> (16 * c)), x[c]);
    });
  }

  // x times the weights of the keys in `mask`; the others' may be garbage.
  static void weigh(uint64_t mask, const float *weights, __m512 (&x)[4]) {
    each<4>([&](auto c) HEADRACE_ALWAYS_INLINE {
      x[c] = _mm512_maskz_mul_ps(mask >> (16 * c), x[c], _mm512_loadu_ps(weights + c * 16));
    });
  }

  static __m512i half_mask(int halves) {
    return _mm512_set1_epi32((halves & 1 ? 0xffff : 0) | (halves & 2 ? 0xffff0000 : 0));
  }

  static void hide(float *s, uint64_t mask) {
    const __m512 low = _mm512_set1_ps(-__builtin_inff());
    for (int c = 0; c < 4; ++c)
      _mm512_store_ps(s + c * 16, _mm512_mask_mov_ps(low, mask >> (16 * c), _mm512_load_ps(s + c * 16)));
  }

  // acc[lane] = acc[lane] * keep + take * (sum over visible keys of p[lane][j] * v[j])
  void values(int n, const bf16 *p, const Seen &seen, float *acc, const Weights &w, int64_t before) const {
    const int together = value_rows_together();
    for (int r = 0; r < n; r += together) {
      const int rows = n - r < together ? n - r : together;
      uint64_t keys = seen.everything ? ~0ull : 0;
      if (!seen.everything)
        for (int i = r; i < r + rows; ++i) keys |= seen.mask(i);
      if (keys) value_rows(rows, p + r * CHUNK, keys, before + r, acc + r * dim, w, r);
    }
  }

  // keys: those that some of the `n` lanes sees, as bits; `before` lanes have met the chunk already.
  void value_rows(int n, const bf16 *p, uint64_t keys, int64_t before, float *acc, const Weights &w, int lane) const {
    switch (n) {
      case 1: return value_columns<1>(p, keys, before, acc, w, lane);
      case 2: return value_columns<2>(p, keys, before, acc, w, lane);
      case 3: return value_columns<3>(p, keys, before, acc, w, lane);
      default: return value_columns<4>(p, keys, before, acc, w, lane);
    }
  }

  template <int R>
  void value_columns(const bf16 *p, uint64_t keys, int64_t before, float *acc, const Weights &w, int lane) const {
    int64_t d = 0;
    auto columns = [&](auto c) {  // as many 16 C columns as there are
      for (; d + 16 * c <= dim; d += 16 * c) {
        const Ahead next = fetched_by_values(before, d, c);
        with_lines<c>(next.lines, [&](auto lines) { value_tile<R, c, lines>(p, keys, next, d, acc, w, lane); });
      }
    };
    if constexpr (R <= 2) columns(Constant<8>{});  // few rows need more columns to keep the multipliers busy
    columns(Constant<4>{});
    columns(Constant<2>{});
    columns(Constant<1>{});
  }

  // Output elements d .. d + 16 C - 1. A key that no lane sees is left out or, in a pair with one that is seen, masked:
  // its value may be garbage, and 0 times NaN is NaN. Leaving out a probability of 0 changes no bit.
  template <int R, int C, int LINES>
  HEADRACE_APART void value_tile(const bf16 *p, uint64_t keys, Ahead next, int64_t d, float *acc, const Weights &w,
                                 int lane) const {
    __m512 sum[R][C];
    clear(sum);
    const bf16 *from = v + 2 * d;
    if (keys == ~0ull)
      pair_steps<R, C, LINES, once<R, C, LINES>>(p, CHUNK, from, 2 * dim, CHUNK / 2, next, sum);
    else
      for (int pair = 0; pair < CHUNK / 2; ++pair) {
        const int halves = keys >> (2 * pair) & 3;
        if (halves) pair_step<R, C>(p + 2 * pair, CHUNK, from + pair * 2 * dim, half_mask(halves), sum);
      }
    fold_values(sum, acc + d, dim, w, lane);
  }

  template <int R, int C>
  static HEADRACE_ALWAYS_INLINE void fold_values(const __m512 (&sum)[R][C], float *acc, int64_t dim, const Weights &w,
                                                 int lane) {
    each<R>([&](auto r) HEADRACE_ALWAYS_INLINE {
      const __m512 keep = _mm512_set1_ps(w.keep[lane + r]), take = _mm512_set1_ps(w.take[lane + r]);
      each<C>([&](auto c) HEADRACE_ALWAYS_INLINE {
        float *at = acc + r * dim + c * 16;
        _mm512_store_ps(at, _mm512_fmadd_ps(sum[r][c], take, _mm512_mul_ps(_mm512_load_ps(at), keep)));
      });
    });
  }
};

#endif

}  // namespace headrace::HEADRACE_NS
