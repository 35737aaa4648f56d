// Attention of lanes over one chunk of int8 keys and values, each key and each value with a scale of its own per KV head.
//
// The integers lie in the order of the policy that reads them (natural.h, paired.h). A chunk is widened to the policy's
// numbers, exactly, once per visit; scores are multiplied by the keys' scales, probabilities by the values'.
#pragma once

#include "natural.h"
#include "paired.h"

namespace headrace::HEADRACE_NS {

// One chunk and KV head of the pools; `ahead` elements on lies the one that is read next.
struct Chunk8 {
  const int8_t *k, *v;
  const float *k_scale, *v_scale;  // [64]
  int64_t ahead;

  // Fetches cache line `line` of the next chunk's keys and values; the scales' come with the first lines. Always inline:
  // GCC takes a function that only prefetches for one without effect, and drops its calls.
  __attribute__((always_inline)) void fetch(int64_t line, int64_t dim) const {
    if (!ahead) return;
    __builtin_prefetch(k + ahead + line * 64, 0, 2);
    __builtin_prefetch(v + ahead + line * 64, 0, 2);
    if (line >= CHUNK / 16) return;
    __builtin_prefetch(k_scale + ahead / dim + line * 16);
    __builtin_prefetch(v_scale + ahead / dim + line * 16);
  }
};

// A policy on a widened copy of the chunk in `scratch`.
template <typename T> Natural<T> widen(const Chunk8 &from, int64_t dim, int64_t padded, float *scratch, Natural<T> *) {
  float *v = scratch + CHUNK * dim;
  for (int64_t d = 0; d < dim; ++d) {
    from.fetch(d, dim);
    for (int64_t j = 0; j < CHUNK; j += W) store(scratch + d * CHUNK + j, load(from.k + d * CHUNK + j));
  }
  for (int64_t j = 0; j < CHUNK; ++j) {
    for (int64_t d = dim; d < padded; ++d) v[j * padded + d] = 0.0f;
    Natural<T>::query(from.v + j * dim, v + j * padded, dim);
  }
  return Natural<T>(scratch, v, dim, padded);
}

#ifdef __AVX512BF16__

HEADRACE_INLINE void widen32(const int8_t *from, bf16 *to) {
  const auto numbers = [&](int at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + at))));
  };
  _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(numbers(16), numbers(0)));
}

inline Paired widen(const Chunk8 &from, int64_t dim, int64_t, float *scratch, Paired *) {
  bf16 *k = reinterpret_cast<bf16 *>(scratch), *v = k + CHUNK * dim;
  for (int64_t d = 0; d < dim; ++d) {
    from.fetch(d, dim);
    for (int64_t half = d * CHUNK; half < (d + 1) * CHUNK; half += CHUNK / 2) {
      widen32(from.k + half, k + half);
      widen32(from.v + half, v + half);
    }
  }
  return Paired(k, v, dim);
}

#endif

template <typename Math> struct Quantised : Math {
  const float *k_scale, *v_scale;

  static int64_t scratch(int64_t dim) { return CHUNK * (dim + (dim + 15) / 16 * 16); }

  Quantised(const Chunk8 &from, int64_t dim, int64_t padded, float *scratch)
      : Math(widen(from, dim, padded, scratch, static_cast<Math *>(nullptr))), k_scale(from.k_scale),
        v_scale(from.v_scale) {}

  // Keys that a lane does not see may have any scale: their scores are replaced before they are looked at.
  void scores(int n, const typename Math::Query *q, float *s, int64_t before) const {
    Math::scores(n, q, s, before);
    for (int r = 0; r < n; ++r, s += CHUNK)
      for (int j = 0; j < CHUNK; j += W) store(s + j, load(s + j) * load(k_scale + j));
  }

  void probabilities(int n, float *s, const Seen &seen, float scale, typename Math::Probability *p, float *m,
                     float *l) const {
    Math::probabilities(n, s, seen, scale, p, m, l, v_scale);
  }
};

// The policy for a chunk and KV head, the `index`-th of the pools, met by so many lanes.
template <typename Math> struct Reader {
  static Math open(const Attend &a, int64_t index, int64_t padded, int64_t ahead, int64_t lanes, float *scratch) {
    const auto *k = static_cast<const typename Math::Type *>(a.k), *v = static_cast<const typename Math::Type *>(a.v);
    const int64_t at = index * CHUNK * a.dim;
    return Math(k + at, v + at, a.dim, padded, ahead, lanes, scratch);
  }
};

template <typename Math> struct Reader<Quantised<Math>> {
  static Quantised<Math> open(const Attend &a, int64_t index, int64_t padded, int64_t ahead, int64_t, float *scratch) {
    const auto *k = static_cast<const int8_t *>(a.k), *v = static_cast<const int8_t *>(a.v);
    const int64_t at = index * CHUNK * a.dim, scale = index * CHUNK;
    return {{k + at, v + at, a.k_scale + scale, a.v_scale + scale, ahead}, a.dim, padded, scratch};
  }
};

}  // namespace headrace::HEADRACE_NS
