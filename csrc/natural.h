// Attention of lanes over one chunk with keys as [D][64] and values as [64][D], in fp32 multiply-adds: every instruction
// set and type. Each sum is a chain in ascending order, whatever the tile, so a lane's bits do not depend on its
// neighbours. P: D rounded up to 16.
#pragma once

#include "lanes.h"

namespace headrace::HEADRACE_NS {

template <typename T> struct Natural {
  static constexpr bool RUNNING = false;
  static constexpr int BATCH = 1, TOGETHER = LANES;
  using Type = T;
  using Space = headrace::HEADRACE_NS::Space;
  using Query = float;
  using Probability = float;
  static constexpr int ROWS = 4;                // lanes in a full tile
  static constexpr int WIDE = W == 16 ? 4 : 2;  // vectors side by side: with ROWS they fill the registers
  static constexpr int CONVERT_LANES = 8;       // from here on, converting a chunk to fp32 once pays

  const T *k, *v;
  int64_t dim, padded;
  const float *wide_k = nullptr, *wide_v = nullptr;  // the chunk in fp32, if converted: [D][64], [64][P]

  static int64_t scratch(int64_t dim) { return CHUNK * (dim + (dim + 15) / 16 * 16); }

  template <typename S> static void query(const S *from, float *to, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load(from + i));
    if (i < n) store_part(to + i, load_part(from + i, n - i), n - i);
  }

  Natural(const T *k, const T *v, int64_t dim, int64_t padded, int64_t, int64_t lanes, const Space &space)
      : k(k), v(v), dim(dim), padded(padded) {
    float *scratch = space.scratch;
    const bool pays = lanes >= CONVERT_LANES && sizeof(T) < sizeof(float);
    if (pays) {
      query(k, scratch, CHUNK * dim);
      wide_k = scratch;
    }
    if (pays || dim != padded) wide_v = widen_values(scratch + CHUNK * dim);
  }

  // On a chunk that is fp32 already: [D][64] and [64][P].
  Natural(const float *wide_k, const float *wide_v, int64_t dim, int64_t padded)
      : k(nullptr), v(nullptr), dim(dim), padded(padded), wide_k(wide_k), wide_v(wide_v) {}

  const float *widen_values(float *to) const {
    for (int64_t j = 0; j < CHUNK; ++j) {
      for (int64_t d = dim; d < padded; ++d) to[j * padded + d] = 0.0f;
      query(v + j * dim, to + j * padded, dim);
    }
    return to;
  }

  // p[lane][j] = sum over d of q[lane][d] * k[d][j]
  void scores(int n, const float *q, float *p, int64_t) const {
    wide_k ? score_rows(n, q, wide_k, p) : score_rows(n, q, k, p);
  }

  template <typename K> void score_rows(int n, const float *q, const K *keys, float *p) const {
    for (; n > 0; n -= ROWS, q += ROWS * dim, p += ROWS * CHUNK) switch (n) {
        case 1: score_tile<1>(q, keys, p); break;
        case 2: score_tile<2>(q, keys, p); break;
        case 3: score_tile<3>(q, keys, p); break;
        default: score_tile<4>(q, keys, p);
      }
  }

  template <int N, typename K> void score_tile(const float *q, const K *keys, float *p) const {
    for (int j = 0; j < CHUNK; j += WIDE * W) {
      vf sum[N][WIDE];
      each<N * WIDE>([&](auto i) HEADRACE_ALWAYS_INLINE { sum[i / WIDE][i % WIDE] = vf{}; });
      for (int64_t d = 0; d < dim; ++d) {
        vf key[WIDE];
        for (int c = 0; c < WIDE; ++c) key[c] = load(keys + d * CHUNK + j + c * W);
        for (int r = 0; r < N; ++r)
          for (int c = 0; c < WIDE; ++c) sum[r][c] = madd(splat(q[r * dim + d]), key[c], sum[r][c]);
      }
      for (int r = 0; r < N; ++r)
        for (int c = 0; c < WIDE; ++c) store(p + r * CHUNK + j + c * W, sum[r][c]);
    }
  }

  static vf power(vf x) { return exp(x); }

  // Raw scores s [n, 64] -> probabilities p [n, 64] relative to each lane's own maximum m, rounded as T is, 0 where the
  // lane sees nothing; l [n] is the sum of the unrounded ones, 0 when no visible score is above -inf. `weights` [64] is
  // what the probabilities are multiplied by before they are rounded, but not in the sum.
  static void probabilities(int n, float *s, const Seen &seen, float scale, float *p, float *m, float *l,
                            const float *weights = nullptr) {
    for (int r = 0; r < n; ++r, s += CHUNK, p += CHUNK) {
      const float low = -__builtin_inff();
      const int first = seen.from(r), last = seen.to(r);
      vf top = splat(low);
      for (int j = 0; j < CHUNK; j += W) {
        vi index;
        for (int i = 0; i < W; ++i) index[i] = j + i;
        const vf x = ((index >= first) & (index < last)) ? load(s + j) * splat(scale) : splat(low);
        top = max(top, x);
        store(s + j, x);
      }
      m[r] = greatest(top);
      m[r] = m[r] == low ? 0.0f : m[r];
      for (int j = 0; j < CHUNK; j += W) {
        const vf x = exp(load(s + j) - splat(m[r]));
        store(s + j, x);
        store(p + j, round_as(static_cast<const T *>(nullptr), weights ? x * load(weights + j) : x));
      }
      l[r] = sum64(s);
    }
  }

  // acc[lane] = acc[lane] * keep + take * (sum over visible keys of p[lane][j] * v[j]).
  void values(int n, const float *p, const Seen &seen, float *acc, const Weights &weights, int64_t) const {
    for (int r = 0; r < n; r += ROWS) {
      const int rows = n - r < ROWS ? n - r : ROWS;
      bool all = true;
      for (int i = r; i < r + rows; ++i) all &= seen.from(i) == 0 && seen.to(i) == CHUNK;
      // Keys that a lane does not see are left out, not multiplied by 0: their values may be garbage.
      if (all) value_rows(rows, p + r * CHUNK, 0, CHUNK, acc + r * padded, weights, r);
      else
        for (int i = r; i < r + rows; ++i)
          if (seen.low[i] < seen.high[i])
            value_rows(1, p + i * CHUNK, seen.low[i], seen.high[i], acc + i * padded, weights, i);
    }
  }

  void value_rows(int n, const float *p, int first, int last, float *acc, const Weights &w, int lane) const {
    wide_v ? value_rows(n, p, first, last, wide_v, padded, acc, w, lane)
           : value_rows(n, p, first, last, v, dim, acc, w, lane);
  }

  template <typename V>
  void value_rows(int n, const float *p, int first, int last, const V *from, int64_t stride, float *acc,
                  const Weights &w, int lane) const {
    switch (n) {
      case 1: return value_columns<1>(p, first, last, from, stride, acc, w, lane);
      case 2: return value_columns<2>(p, first, last, from, stride, acc, w, lane);
      case 3: return value_columns<3>(p, first, last, from, stride, acc, w, lane);
      default: return value_columns<4>(p, first, last, from, stride, acc, w, lane);
    }
  }

  template <int N, typename V>
  void value_columns(const float *p, int first, int last, const V *from, int64_t stride, float *acc, const Weights &w,
                     int lane) const {
    int64_t d = 0;
    for (; d + WIDE * W <= padded; d += WIDE * W)
      value_tile<N, WIDE>(p, first, last, from + d, stride, acc + d, w, lane);
    for (; d + 2 * W <= padded; d += 2 * W) value_tile<N, 2>(p, first, last, from + d, stride, acc + d, w, lane);
    for (; d < padded; d += W) value_tile<N, 1>(p, first, last, from + d, stride, acc + d, w, lane);
  }

  template <int N, int C, typename V>
  void value_tile(const float *p, int first, int last, const V *from, int64_t stride, float *acc, const Weights &w,
                  int lane) const {
    vf sum[N][C];
    each<N * C>([&](auto i) HEADRACE_ALWAYS_INLINE { sum[i / C][i % C] = vf{}; });
    for (int j = first; j < last; ++j) {
      vf value[C];
      for (int c = 0; c < C; ++c) value[c] = load(from + j * stride + c * W);
      for (int r = 0; r < N; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = madd(splat(p[r * CHUNK + j]), value[c], sum[r][c]);
    }
    for (int r = 0; r < N; ++r)
      for (int c = 0; c < C; ++c) {
        float *at = acc + r * padded + c * W;
        store(at, madd(sum[r][c], splat(w.take[lane + r]), load(at) * splat(w.keep[lane + r])));
      }
  }
};

}  // namespace headrace::HEADRACE_NS
