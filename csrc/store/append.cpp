// New keys and values into the pools. T: rows, K pool [slots, Hkv, D, 64] (keys contiguous), V pool [slots, Hkv, 64, D];
// in bf16 pairs [slots, Hkv, D/2, 64, 2] and [slots, Hkv, 32, D, 2]. int8 pools lie as those of the type computed in. Where there
// is no K pool, values are the keys too.
#include "attention/transposed.h"
#include "attention/vnni.h"
#include "common/arena.h"
#include "common/shares.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

namespace {

// to[2 d + odd] = from[d]
template <typename S> void every_other(const S *from, S *to, int64_t dim, int odd) {
  for (int64_t d = 0; d < dim; ++d) to[2 * d + odd] = from[d];
}

#ifdef __AVX512BF16__

// The same 16 at a time: D is a multiple of that.
void every_other(const bf16 *from, bf16 *to, int64_t dim, int odd) {
  const __mmask32 halves = odd ? 0xaaaaaaaa : 0x55555555;
  const __m128i shift = _mm_cvtsi32_si128(16 * odd);
  for (int64_t d = 0; d < dim; d += 16) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + d)));
    _mm512_mask_storeu_epi16(to + 2 * d, halves, _mm512_sll_epi32(words, shift));
  }
}

#endif

template <typename S> void place_key(const S *k_new, S *k, int64_t dim, int64_t offset, bool pairs) {
  if (pairs)
    for (int64_t d = 0; d < dim; d += 2) memcpy(k + d * CHUNK + 2 * offset, k_new + d, 2 * sizeof(S));
  else
    for (int64_t d = 0; d < dim; ++d) k[d * CHUNK + offset] = k_new[d];
}

template <typename S> void place_value(const S *v_new, S *v, int64_t dim, int64_t offset, bool pairs) {
  if (pairs) every_other(v_new, v + offset / 2 * 2 * dim, dim, static_cast<int>(offset % 2));
  else memcpy(v + offset * dim, v_new, dim * sizeof(S));
}

#ifdef __AVX512BF16__

constexpr int RUN = 16;  // rows whose keys fill a vector of pairs

// Keys of 16 rows at keys offset .. offset + 15 of a chunk in pairs: vectors where `place_key` writes single words.
void place_keys(const bf16 *k_new, int64_t k_stride, bf16 *k, int64_t dim, int64_t offset) {
  for (int64_t d = 0; d + 32 <= dim; d += 32) {
    Words<4, RUN>::Row x[RUN];
    each<RUN>([&](auto i) HEADRACE_ALWAYS_INLINE { memcpy(&x[i], k_new + i * k_stride + d, sizeof x[i]); });
    transpose<4, RUN>(x);
    each<RUN>([&](auto i) HEADRACE_ALWAYS_INLINE { memcpy(k + (d + 2 * i) * CHUNK + 2 * offset, &x[i], sizeof x[i]); });
  }
  for (int64_t d = dim / 32 * 32; d < dim; d += 2)
    for (int64_t i = 0; i < RUN; ++i) memcpy(k + d * CHUNK + 2 * (offset + i), k_new + i * k_stride + d, 4);
}

// Their values.
void place_values(const bf16 *v_new, int64_t v_stride, bf16 *v, int64_t dim, int64_t offset) {
  for (int64_t i = 0; i < RUN; i += 2) {
    const bf16 *first = v_new + i * v_stride, *second = first + v_stride;
    bf16 *to = v + (offset + i) * dim;
    for (int64_t d = 0; d < dim; ++d) to[2 * d] = first[d], to[2 * d + 1] = second[d];
  }
}

// Whether rows row .. row + 15 are the keys that fill a vector of one chunk.
bool is_run(const Append &a, int64_t row) {
  if (row + RUN > a.rows || a.offsets[row] % RUN) return false;
  int others = 0;
  for (int i = 1; i < RUN; ++i) others += a.slots[row + i] != a.slots[row] || a.offsets[row + i] != a.offsets[row] + i;
  return others == 0;
}

#endif

uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
uint32_t bits_of(bf16 x) { return static_cast<uint32_t>(x) << 16; }

// x [D] = scale * to, to half a scale; returns the scale, the greatest |x| / 127. Where x holds an infinity or a NaN, so
// does the scale: nothing that is not a number is hidden.
template <typename T> float quantise(const T *x, int64_t dim, int8_t *to) {
  uint32_t top = 0;  // as integers, absolute values have the order of numbers, and NaN comes last
  for (int64_t d = 0; d < dim; ++d) {
    const uint32_t size = bits_of(x[d]) & 0x7fffffff;
    top = size > top ? size : top;
  }
  const float scale = number(top) / 127.0f, magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds, to even at a half
  for (int64_t d = 0; d < dim; ++d) {
    float y = number(bits_of(x[d])) / scale;
    y = y > 127.0f ? 127.0f : y;  // where the scale is subnormal
    y = y < -127.0f ? -127.0f : y;
    y = y == y && scale > 0.0f ? y : 0.0f;
    to[d] = static_cast<int8_t>((y + magic) - magic);
  }
  return scale;
}

template <typename T> void store_row(const Append &a, const T *k_new, const T *v_new, int64_t index, int64_t offset) {
  const int64_t chunk = index * CHUNK * a.dim, token = index * CHUNK + offset;
  const bool pairs = sizeof(T) == 2 && is_vnni(a.dim);
  if (!a.v_scale) {
    if (a.k) place_key(k_new, static_cast<T *>(a.k) + chunk, a.dim, offset, pairs);
    place_value(v_new, static_cast<T *>(a.v) + chunk, a.dim, offset, pairs);
    return;
  }
  int8_t *codes = arena(room<int8_t>(a.dim)).take<int8_t>(a.dim);
  if (a.k) {
    a.k_scale[token] = quantise(k_new, a.dim, codes);
    place_key(codes, static_cast<int8_t *>(a.k) + chunk, a.dim, offset, pairs);
  }
  a.v_scale[token] = quantise(v_new, a.dim, codes);
  place_value(codes, static_cast<int8_t *>(a.v) + chunk, a.dim, offset, pairs);
}

}  // namespace

template <typename T> void append(const Append &a) {
  // Split by head: two rows of one chunk share cache lines of K, two heads do not. A row's lines have left the caches by
  // the next step, so that it takes about a microsecond for each head.
  share_out(a.kv_heads, a.rows * a.kv_heads * a.dim > 1024 ? a.threads : 1, [&](int64_t head) {
    for (int64_t row = 0; row < a.rows;) {
      const T *k_new = static_cast<const T *>(a.k_new) + row * a.k_stride + head * a.dim;
      const T *v_new = static_cast<const T *>(a.v_new) + row * a.v_stride + head * a.dim;
      const int64_t index = a.slots[row] * a.kv_heads + head;
#ifdef __AVX512BF16__
      if constexpr (sizeof(T) == 2)
        if (!a.v_scale && is_vnni(a.dim) && is_run(a, row)) {
          const int64_t chunk = index * CHUNK * a.dim;
          if (a.k) place_keys(k_new, a.k_stride, static_cast<T *>(a.k) + chunk, a.dim, a.offsets[row]);
          place_values(v_new, a.v_stride, static_cast<T *>(a.v) + chunk, a.dim, a.offsets[row]);
          row += RUN;
          continue;
        }
#endif
      store_row(a, k_new, v_new, index, a.offsets[row]);
      row += 1;
    }
  });
}

HEADRACE_BOTH_TYPES(append, Append)

}  // namespace headrace::HEADRACE_NS
