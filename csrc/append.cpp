// New keys and values into the pools. T: rows, K pool [slots, Hkv, D, 64] (keys contiguous), V pool [slots, Hkv, 64, D].
#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_NS {

template <typename T> void append(const Append &a) {
  // Split by head: two rows of one chunk share cache lines of K, two heads do not.
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.kv_heads * a.dim > 16384)
  for (int64_t head = 0; head < a.kv_heads; ++head) {
    for (int64_t row = 0; row < a.rows; ++row) {
      const int64_t chunk = (a.slots[row] * a.kv_heads + head) * CHUNK * a.dim, offset = a.offsets[row];
      const T *k_new = static_cast<const T *>(a.k_new) + row * a.k_stride + head * a.dim;
      const T *v_new = static_cast<const T *>(a.v_new) + row * a.v_stride + head * a.dim;
      T *k = static_cast<T *>(a.k) + chunk + offset;
      for (int64_t d = 0; d < a.dim; ++d) k[d * CHUNK] = k_new[d];
      memcpy(static_cast<T *>(a.v) + chunk + offset * a.dim, v_new, a.dim * sizeof(T));
    }
  }
}

template void append<bf16>(const Append &);
template void append<float>(const Append &);

}  // namespace headrace::HEADRACE_NS
