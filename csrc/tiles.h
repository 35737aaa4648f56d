// The two products of attention over one chunk of 64 keys, for tiles of up to four lanes.
//
// A lane is one (row, query head). Each element of a result is a chain of multiply-adds in ascending order, whatever the
// tile, so a lane's bits do not depend on its neighbours. D: head size, P: D rounded up to 16.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_NS {

constexpr int LANES = 4;                // lanes in a full tile
constexpr int WIDE = W == 16 ? 4 : 2;  // vectors side by side: with LANES they fill the registers

// scores[lane][j] = sum over d of q[lane][d] * k[d][j]
template <int N, typename T>
HEADRACE_INLINE void score_tile(const float *q, const T *k, int64_t dim, float *scores) {
  for (int j = 0; j < CHUNK; j += WIDE * W) {
    vf sum[N][WIDE] = {};
    for (int64_t d = 0; d < dim; ++d) {
      vf key[WIDE];
      for (int c = 0; c < WIDE; ++c) key[c] = load(k + d * CHUNK + j + c * W);
      for (int r = 0; r < N; ++r)
        for (int c = 0; c < WIDE; ++c) sum[r][c] = madd(splat(q[r * dim + d]), key[c], sum[r][c]);
    }
    for (int r = 0; r < N; ++r)
      for (int c = 0; c < WIDE; ++c) store(scores + r * CHUNK + j + c * W, sum[r][c]);
  }
}

template <typename T>
static void scores(int lanes, const float *q, const T *k, int64_t dim, float *out) {
  switch (lanes) {
    case 1: return score_tile<1>(q, k, dim, out);
    case 2: return score_tile<2>(q, k, dim, out);
    case 3: return score_tile<3>(q, k, dim, out);
    default: return score_tile<4>(q, k, dim, out);
  }
}

// How a chunk's contribution enters a lane's state: acc = acc * keep + chunk * take.
struct Weights {
  float keep, take;
};

template <int N, int C, typename T>
HEADRACE_INLINE void value_tile(const float *p, int first, int last, const T *v, int64_t stride, float *acc,
                                int64_t padded, const Weights *weights) {
  vf sum[N][C] = {};
  for (int j = first; j < last; ++j) {
    vf value[C];
    for (int c = 0; c < C; ++c) value[c] = load(v + j * stride + c * W);
    for (int r = 0; r < N; ++r)
      for (int c = 0; c < C; ++c) sum[r][c] = madd(splat(p[r * CHUNK + j]), value[c], sum[r][c]);
  }
  for (int r = 0; r < N; ++r)
    for (int c = 0; c < C; ++c) {
      float *at = acc + r * padded + c * W;
      store(at, madd(load(at), splat(weights[r].keep), sum[r][c] * splat(weights[r].take)));
    }
}

// Adds to each lane's acc [P] the sum over keys first..last-1 of p[lane][j] * v[j][:]; never reads other keys' values.
template <int N, typename T>
HEADRACE_INLINE void value_rows(const float *p, int first, int last, const T *v, int64_t stride, float *acc,
                                int64_t padded, const Weights *weights) {
  int64_t d = 0;
  for (; d + WIDE * W <= padded; d += WIDE * W)
    value_tile<N, WIDE>(p, first, last, v + d, stride, acc + d, padded, weights);
  for (; d + 2 * W <= padded; d += 2 * W)
    value_tile<N, 2>(p, first, last, v + d, stride, acc + d, padded, weights);
  for (; d < padded; d += W) value_tile<N, 1>(p, first, last, v + d, stride, acc + d, padded, weights);
}

template <typename T>
static void values(int lanes, const float *p, int first, int last, const T *v, int64_t stride, float *acc,
                   int64_t padded, const Weights *weights) {
  switch (lanes) {
    case 1: return value_rows<1>(p, first, last, v, stride, acc, padded, weights);
    case 2: return value_rows<2>(p, first, last, v, stride, acc, padded, weights);
    case 3: return value_rows<3>(p, first, last, v, stride, acc, padded, weights);
    default: return value_rows<4>(p, first, last, v, stride, acc, padded, weights);
  }
}

// Turns raw scores s [64] into probabilities relative to their own maximum (0 outside first..last-1), rounded as T is;
// returns their unrounded sum, 0 when every visible score is -inf. bias [64] may be null.
template <typename T>
HEADRACE_INLINE float probabilities(float *s, int first, int last, float scale, const float *bias, const T *tag,
                                    float &max_out) {
  const float low = -__builtin_inff();
  vf top = splat(low);
  for (int j = 0; j < CHUNK; j += W) {
    vf x = load(s + j) * splat(scale);
    if (bias) x = x + load(bias + j);
    vi index;
    for (int i = 0; i < W; ++i) index[i] = j + i;
    x = ((index >= first) & (index < last)) ? x : splat(low);
    top = max(top, x);
    store(s + j, x);
  }
  float m = low;
  for (int i = 0; i < W; ++i) m = top[i] > m ? top[i] : m;
  max_out = m = m == low ? 0.0f : m;
  for (int j = 0; j < CHUNK; j += W) store(s + j, exp(load(s + j) - splat(m)));
  const float sum = sum64(s);
  for (int j = 0; j < CHUNK; j += W) store(s + j, round_as(tag, load(s + j)));
  return sum;
}

}  // namespace headrace::HEADRACE_NS
