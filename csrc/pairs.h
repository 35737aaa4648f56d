// Products of bf16 pairs, the work of AVX-512 BF16: sums[r][c] += x[r][2i] * w[i][c][0] + x[r][2i+1] * w[i][c][1].
//
// Every sum is one chain over ascending pairs, whatever the tile: a row's bits do not depend on its neighbours.
#pragma once

#ifdef __AVX512BF16__

#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_NS {

constexpr int TILE_ROWS = 4;  // with four vectors of sums side by side they fill half the registers

HEADRACE_INLINE __m512bh splat_pair(const bf16 *x) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// One pair of each row with 16 C columns of weights, of which `keep` masks the halves.
template <int R, int C>
HEADRACE_INLINE void pair_step(const bf16 *x, int64_t x_stride, const bf16 *w, __m512i keep, __m512 (&sum)[R][C]) {
  __m512bh weight[C];
  for (int c = 0; c < C; ++c) weight[c] = (__m512bh)_mm512_and_si512(_mm512_loadu_si512(w + c * 32), keep);
  for (int r = 0; r < R; ++r) {
    const __m512bh input = splat_pair(x + r * x_stride);
    for (int c = 0; c < C; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], input, weight[c]);
  }
}

// `pairs` pairs; each fetches LINES cache lines of what comes `ahead` elements later.
template <int R, int C, int LINES>
HEADRACE_INLINE void pair_steps(const bf16 *x, int64_t x_stride, const bf16 *w, int64_t w_stride, int64_t pairs,
                                const bf16 *ahead, __m512 (&sum)[R][C]) {
  for (int64_t i = 0; i < pairs; ++i) {
    for (int line = 0; line < LINES; ++line)
      _mm_prefetch(reinterpret_cast<const char *>(ahead + i * w_stride + line * 32), _MM_HINT_T0);
    __m512bh weight[C];
    for (int c = 0; c < C; ++c) weight[c] = (__m512bh)_mm512_loadu_si512(w + i * w_stride + c * 32);
    for (int r = 0; r < R; ++r) {
      const __m512bh input = splat_pair(x + r * x_stride + 2 * i);
      for (int c = 0; c < C; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], input, weight[c]);
    }
  }
}

}  // namespace headrace::HEADRACE_NS

#endif
