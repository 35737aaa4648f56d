// Norms over a row or head, in fp32, rounded once at the end. T: rows, H: width.
//
// Sums run over 64 lanes (element i goes to lane i % 64), which are then added by sum64: one order for every W.
#include "common/shares.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t MANY_NUMBERS = 16384;  // elements below which waking the other threads costs more than it saves

// Sum over the row of (x - mean)^2 with SQUARES, else of x.
template <bool SQUARES, typename T> float row_sum(const T *x, int64_t width, float mean) {
  constexpr int V = CHUNK / W;
  vf lanes[V] = {};
  const vf shift = splat(mean);
  auto add = [&](vf &lane, vf value) {
    const vf y = value - shift;
    lane = SQUARES ? madd(y, y, lane) : lane + value;
  };
  int64_t i = 0;
  for (; i + CHUNK <= width; i += CHUNK)
    for (int c = 0; c < V; ++c) add(lanes[c], load(x + i + c * W));
  alignas(64) float sums[CHUNK];
  for (int c = 0; c < V; ++c) store(sums + c * W, lanes[c]);
  for (int j = 0; i + j < width; ++j) {
    vf lane = splat(sums[j]);
    add(lane, load_part(x + i + j, 1));
    sums[j] = lane[0];
  }
  return sum64(sums);
}

// out = (x - mean) * factor * (weight + offset) + bias, either vector may be null
template <typename T>
void write_row(const Norm &a, const T *x, T *out, float mean, float factor) {
  const T *weight = static_cast<const T *>(a.weight), *bias = static_cast<const T *>(a.bias);
  for (int64_t i = 0; i < a.width; i += W) {
    const int64_t n = a.width - i;
    vf y = (load_up_to(x + i, n) - splat(mean)) * splat(factor);
    if (weight) y = y * (load_up_to(weight + i, n) + splat(a.offset));
    if (bias) y = y + load_up_to(bias + i, n);
    store_up_to(out + i, y, n);
  }
}

float reciprocal_root(float x) { return 1.0f / __builtin_sqrtf(x); }

// f(x, out) for each head of each row.
template <typename T, typename F> void each_head(const Norm &a, F f) {
  share_each(a.rows * a.heads, a.rows * a.heads * a.width > MANY_NUMBERS ? a.threads : 1, [&](int64_t i) {
    const int64_t at = i / a.heads * a.stride + i % a.heads * a.width;
    f(static_cast<const T *>(a.x) + at, static_cast<T *>(a.out) + at);
  });
}

}  // namespace

template <typename T> void rms_norm(const Norm &a) {
  each_head<T>(a, [&](const T *x, T *out) {
    const float mean = row_sum<true>(x, a.width, 0.0f) / static_cast<float>(a.width);
    write_row(a, x, out, 0.0f, reciprocal_root(mean + a.eps));
  });
}

template <typename T> void layer_norm(const Norm &a) {
  each_head<T>(a, [&](const T *x, T *out) {
    const float width = static_cast<float>(a.width);
    const float mean = row_sum<false>(x, a.width, 0.0f) / width;
    const float variance = row_sum<true>(x, a.width, mean) / width;
    write_row(a, x, out, mean, reciprocal_root(variance + a.eps));
  });
}

HEADRACE_BOTH_TYPES(rms_norm, Norm)
HEADRACE_BOTH_TYPES(layer_norm, Norm)

}  // namespace headrace::HEADRACE_NS
