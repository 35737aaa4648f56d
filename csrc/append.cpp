// New keys and values into the pools. T: rows, K pool [slots, Hkv, D, 64] (keys contiguous), V pool [slots, Hkv, 64, D];
// in bf16 pairs [slots, Hkv, D/2, 64, 2] and [slots, Hkv, 32, D, 2]. int8 pools lie as those of the type computed in.
#include "arena.h"
#include "kernels.h"
#include "paired.h"
#include "simd.h"

namespace headrace::HEADRACE_NS {

namespace {

template <typename S> void place(const S *k_new, const S *v_new, S *k, S *v, int64_t dim, int64_t offset, bool pairs) {
  if (pairs) {
    for (int64_t d = 0; d < dim; d += 2) memcpy(k + d * CHUNK + 2 * offset, k_new + d, 2 * sizeof(S));
    S *to = v + offset / 2 * 2 * dim + offset % 2;
    for (int64_t d = 0; d < dim; ++d) to[2 * d] = v_new[d];
    return;
  }
  for (int64_t d = 0; d < dim; ++d) k[d * CHUNK + offset] = k_new[d];
  memcpy(v + offset * dim, v_new, dim * sizeof(S));
}

uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
uint32_t bits_of(bf16 x) { return static_cast<uint32_t>(x) << 16; }

float number(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

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
  const int64_t chunk = index * CHUNK * a.dim;
  const bool pairs = sizeof(T) == 2 && paired(a.dim);
  if (!a.k_scale) {
    place(k_new, v_new, static_cast<T *>(a.k) + chunk, static_cast<T *>(a.v) + chunk, a.dim, offset, pairs);
    return;
  }
  int8_t *k8 = reinterpret_cast<int8_t *>(arena((2 * a.dim + 3) / 4)), *v8 = k8 + a.dim;
  a.k_scale[index * CHUNK + offset] = quantise(k_new, a.dim, k8);
  a.v_scale[index * CHUNK + offset] = quantise(v_new, a.dim, v8);
  place(k8, v8, static_cast<int8_t *>(a.k) + chunk, static_cast<int8_t *>(a.v) + chunk, a.dim, offset, pairs);
}

}  // namespace

template <typename T> void append(const Append &a) {
  // Split by head: two rows of one chunk share cache lines of K, two heads do not.
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.kv_heads * a.dim > 16384)
  for (int64_t head = 0; head < a.kv_heads; ++head) {
    for (int64_t row = 0; row < a.rows; ++row) {
      const T *k_new = static_cast<const T *>(a.k_new) + row * a.k_stride + head * a.dim;
      const T *v_new = static_cast<const T *>(a.v_new) + row * a.v_stride + head * a.dim;
      store_row(a, k_new, v_new, a.slots[row] * a.kv_heads + head, a.offsets[row]);
    }
  }
}

template void append<bf16>(const Append &);
template void append<float>(const Append &);

}  // namespace headrace::HEADRACE_NS
