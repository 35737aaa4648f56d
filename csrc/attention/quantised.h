// Attention of lanes over one chunk of int8 keys and values, each key and each value with a scale of its own per KV head.
//
// The integers lie in the order of the policy that reads them (plain.h, vnni.h), whose numbers hold them exactly: it
// works on a widened copy of the chunk, or widens as it goes. Scores are multiplied by the keys' scales, probabilities by
// the values'.
#pragma once

#include "attention/amx.h"
#include "attention/plain.h"
#include "attention/transposed.h"
#include "attention/vnni.h"

namespace headrace::HEADRACE_NS {

// One chunk and KV head of the pools, and how it is met.
struct Chunk8 : ChunkOf<int8_t> {
  const float *k_scale, *v_scale;  // [64]
  Visit visit;

  // Keys that a lane does not see may have any scale: their scores are replaced before they are looked at.
  void scale_scores(int n, float *s) const {
    for (int r = 0; r < n; ++r, s += CHUNK)
      for (int j = 0; j < CHUNK; j += W) store(s + j, load(s + j) * load(k_scale + j));
  }
};

HEADRACE_INLINE void fetch_scales(const Chunk8 &chunk, int64_t dim) {
  const int64_t ahead = chunk.visit.ahead / dim;
  for (int64_t j = 0; j < CHUNK; j += 32) {
    fetch_near<2>(chunk.k_scale + ahead + j);
    fetch_near<2>(chunk.v_scale + ahead + j);
  }
}

template <typename Math> struct Quantised;

template <typename T> struct Quantised<Plain<T>> : Plain<T, int8_t> {
  using Integers = Plain<T, int8_t>;
  Chunk8 chunk;

  Quantised(const Chunk8 &chunk, int64_t dim, int64_t padded, const typename Integers::Space &space)
      : Integers(chunk, dim, padded, chunk.visit, space), chunk(chunk) {
    fetch_scales(chunk, dim);
  }

  void scores(int n, const float *q, float *s, int64_t before) const {
    Integers::scores(n, q, s, before);
    chunk.scale_scores(n, s);
  }

  void probabilities(int n, float *s, const Seen &seen, float scale, float *p, float *m, float *l) const {
    Integers::probabilities(n, s, seen, scale, p, m, l, chunk.v_scale);
  }
};

static_assert(ChunkPolicy<Quantised<Plain<bf16>>> && ChunkPolicy<Quantised<Plain<float>>>);

#ifdef __AVX512BF16__

// 32 integers as bf16.
HEADRACE_INLINE __m512bh widened(const int8_t *from) {
  const auto numbers = [&](int at) __attribute__((always_inline)) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + at))));
  };
  return _mm512_cvtne2ps_pbh(numbers(16), numbers(0));
}

// pair_steps on integers: the same chains of sums. Each step fetches two cache lines from `next` on.
template <int R, int C>
HEADRACE_INLINE void pair_steps(const bf16 *x, int64_t x_stride, const int8_t *w, int64_t w_stride, int64_t pairs,
                                const int8_t *next, __m512 (&sum)[R][C]) {
  for (int64_t i = 0; i < pairs; ++i, x += 2, w += w_stride) {
    fetch_near<2>(next + i * 128);
    __m512bh weight[C];
    HEADRACE_EACH(c, C, weight[c] = widened(w + c * 32));
    multiply<R, C>(x, x_stride, weight, sum);
  }
}

// A chunk's keys or values as bf16, fetching those that are read next.
inline void widen(const int8_t *from, const int8_t *next, bf16 *to, int64_t dim) {
  for (int64_t i = 0; i < CHUNK * dim; i += 128) {
    fetch_near<2>(next + i);
    for (int part = 0; part < 128; part += 32) _mm512_store_si512(to + i + part, (__m512i)widened(from + i + part));
  }
}

// Few lanes, one tile of TILE_ROWS at most, widen as they go; for more a copy in `scratch` pays.
template <> struct Quantised<Vnni> : Vnni {
  Chunk8 chunk;
  bool few;
  bf16 *copy;  // [2][64 D]: keys, values

  Quantised(const Chunk8 &chunk, int64_t dim, int64_t, const Space &space)
      : Vnni(space.scratch, space.scratch + CHUNK * dim, dim), chunk(chunk), few(chunk.visit.lanes <= TILE_ROWS),
        copy(space.scratch) {
    fetch_scales(chunk, dim);
    if (few) return;
    widen(chunk.k, chunk.stored + chunk.visit.ahead, copy, dim);
    widen_values(dim);
  }

  static int64_t scratch(int64_t dim) { return 2 * CHUNK * dim; }

  void scores(int n, const bf16 *q, float *s, int64_t before) const {
    if (few) with_tile_rows<TILE_ROWS>(n, [&](auto rows) { this->score_few<rows>(q, s); });
    else Vnni::scores(n, q, s, before);
    chunk.scale_scores(n, s);
  }

  // Fetches the values meanwhile, and value_few the next keys: as Vnni does for one group of lanes.
  template <int R> HEADRACE_APART void score_few(const bf16 *q, float *s) const {
    __m512 sum[R][4];
    clear(sum);
    pair_steps<R, 4>(q, dim, chunk.k, 2 * CHUNK, dim / 2, chunk.v, sum);
    HEADRACE_EACH(r, R, store_scores(sum[r], s + r * CHUNK));
  }

  uint32_t probabilities(int n, float *s, const Seen &seen, float scale, bf16 *p, float *m, float *l, float *keep,
                         const Fetch &fetch) const {
    return Vnni::probabilities(n, s, seen, scale, p, m, l, keep, fetch, chunk.v_scale);
  }

  void values(const Waiting *all, int count, float *acc) const {
    if (!few || !all->chunks) return Vnni::values(all, count, acc);
    const int n = all->lanes;
    if (all->seen.union_of(0, n) == ~0ull)
      return with_tile_rows<TILE_ROWS>(n, [&](auto rows) { this->value_few<rows>(all->p, acc); });
    widen_values(dim);
    Vnni::values(all, count, acc);
  }

  void widen_values(int64_t dim) const { widen(chunk.v, chunk.v + chunk.visit.ahead, copy + CHUNK * dim, dim); }

  template <int R> void value_few(const bf16 *p, float *acc) const {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) value_few<R, 4>(p, d, acc);
    for (; d < dim; d += 16) value_few<R, 1>(p, d, acc);
  }

  template <int R, int C> HEADRACE_APART void value_few(const bf16 *p, int64_t d, float *acc) const {
    __m512 sum[R][C];
    clear(sum);
    pair_steps<R, C>(p, CHUNK, chunk.v + 2 * d, 2 * dim, CHUNK / 2, chunk.stored + chunk.visit.ahead + d * CHUNK, sum);
    HEADRACE_EACH(r, R, add_values(sum[r], acc + r * dim + d));
  }
};

static_assert(RunningPolicy<Quantised<Vnni>>);

#endif

#ifdef __AMX_BF16__

template <> struct Quantised<Amx> : Amx {
  static constexpr int BATCH = 1;  // there is room for one widened chunk
  Chunk8 chunk;

  Quantised(const Chunk8 &chunk, int64_t dim, int64_t, Space &space) : Quantised(chunk, dim, space.scratch, space.tiles) {
    fetch_scales(chunk, dim);
  }

  static int64_t scratch(int64_t dim) { return 3 * CHUNK * dim; }  // keys, values, masked values

  void scores(int n, const bf16 *q, float *s, int64_t before) const {
    Amx::scores(n, q, s, before);
    chunk.scale_scores(n, s);
  }

  uint32_t probabilities(int n, float *s, const Seen &seen, float scale, bf16 *p, float *m, float *l, float *keep,
                         const Fetch &fetch) const {
    return Amx::probabilities(n, s, seen, scale, p, m, l, keep, fetch, chunk.v_scale);
  }

 private:
  Quantised(const Chunk8 &chunk, int64_t dim, bf16 *copy, Tiles &tiles)
      : Amx(copy, copy + CHUNK * dim, dim, copy + 2 * CHUNK * dim, tiles), chunk(chunk) {
    widen(chunk.k, chunk.v, copy, CHUNK * dim);
    widen(chunk.v, chunk.stored + chunk.visit.ahead, copy + CHUNK * dim, CHUNK * dim);
  }

  // n integers as bf16, fetching those that are read 2 KB later; `next` are read behind these.
  HEADRACE_APART static void widen(const int8_t *from, const int8_t *next, bf16 *to, int64_t n) {
    const int64_t ahead = n < 2048 ? n : 2048;
    widen(from, 0, n - ahead, from + ahead, to);
    widen(from, n - ahead, n, next - (n - ahead), to);
  }

  // Integers first .. end - 1.
  HEADRACE_INLINE void widen(const int8_t *from, int64_t first, int64_t end, const int8_t *later, bf16 *to) {
#pragma GCC unroll 1
    for (int64_t i = first; i < end; i += 128) {
      fetch_twice<2>(later + i);
      for (int part = 0; part < 128; part += 32) _mm512_store_si512(to + i + part, (__m512i)widened(from + i + part));
    }
  }
};

static_assert(RunningPolicy<Quantised<Amx>>);

#endif

// The chunk and KV head that are the `index`-th of the pools, and the `place`-th of those that are met at once.
template <typename Math, typename S>
ChunkOf<S> chunk_of(const Attend &a, int64_t index, const typename Math::Space &space, int place) {
  const int64_t numbers = CHUNK * a.dim;
  const S *v = static_cast<const S *>(a.v) + index * numbers;
  if (a.k) {
    const S *k = static_cast<const S *>(a.k) + index * numbers;
    return {k, v, k};
  }
  S *keys = static_cast<S *>(space.keys) + place * numbers;
  keys_of_values<Math::PAIRS>(v, a.dim, a.dim, keys);
  return {keys, v, v};
}

// The policy for that chunk.
template <typename Math> struct Reader {
  using Number = typename Math::Type;  // of the pools

  static Math open(const Attend &a, int64_t index, int place, int64_t padded, const Visit &visit, typename Math::Space &space) {
    return Math(chunk_of<Math, Number>(a, index, space, place), a.dim, padded, visit, space);
  }
};

template <typename Math> struct Reader<Quantised<Math>> {
  using Number = int8_t;

  static Quantised<Math> open(const Attend &a, int64_t index, int place, int64_t padded, const Visit &visit,
                              typename Math::Space &space) {
    const int64_t scale = index * CHUNK;
    return {
        {chunk_of<Math, Number>(a, index, space, place), a.k_scale + scale, a.v_scale + scale, visit}, a.dim, padded, space};
  }
};

}  // namespace headrace::HEADRACE_NS
