// New keys and values into the pools. T: rows, K pool [slots, Hkv, D, 64] (keys contiguous), V pool [slots, Hkv, 64, D];
// in bf16 pairs [slots, Hkv, D/2, 64, 2] and [slots, Hkv, 32, D, 2].
#include "kernels.h"
#include "paired.h"
#include "simd.h"

namespace headrace::HEADRACE_NS {

namespace {

template <typename T> void place(const T *k_new, const T *v_new, T *k, T *v, int64_t dim, int64_t offset) {
  if (sizeof(T) == 2 && paired(dim)) {
    for (int64_t d = 0; d < dim; d += 2) memcpy(k + d * CHUNK + 2 * offset, k_new + d, 2 * sizeof(T));
    T *to = v + offset / 2 * 2 * dim + offset % 2;
    for (int64_t d = 0; d < dim; ++d) to[2 * d] = v_new[d];
    return;
  }
  for (int64_t d = 0; d < dim; ++d) k[d * CHUNK + offset] = k_new[d];
  memcpy(v + offset * dim, v_new, dim * sizeof(T));
}

}  // namespace

template <typename T> void append(const Append &a) {
  // Split by head: two rows of one chunk share cache lines of K, two heads do not.
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.kv_heads * a.dim > 16384)
  for (int64_t head = 0; head < a.kv_heads; ++head) {
    for (int64_t row = 0; row < a.rows; ++row) {
      const int64_t chunk = (a.slots[row] * a.kv_heads + head) * CHUNK * a.dim, offset = a.offsets[row];
      const T *k_new = static_cast<const T *>(a.k_new) + row * a.k_stride + head * a.dim;
      const T *v_new = static_cast<const T *>(a.v_new) + row * a.v_stride + head * a.dim;
      place(k_new, v_new, static_cast<T *>(a.k) + chunk, static_cast<T *>(a.v) + chunk, a.dim, offset);
    }
  }
}

template void append<bf16>(const Append &);
template void append<float>(const Append &);

}  // namespace headrace::HEADRACE_NS
