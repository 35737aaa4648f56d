// Elementwise operations: activations, sums and rotary embedding, in fp32, rounded once. An element's bits do not depend on
// its place: the last elements of a row go through the same vector code, padded.
#include "common/shares.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t MANY_ELEMENTS = 16384;  // elements below which waking the other threads costs more than it saves

struct Gelu {
  // x * Phi(x). erfc(z) = e^(-z^2) t P(t) with t = 1 / (1 + z / 3), P a Chebyshev fit for 0 <= z <= 10, error 2e-9.
  static vf apply(vf x) {
    const vf size = x < 0.0f ? -x : x;
    const vf t = 1.0f / madd(size, splat(0.70710678f / 3.0f), splat(1.0f));
    vf p = splat(0.05704096532f);
    p = madd(p, t, splat(-0.2993730934f));
    p = madd(p, t, splat(0.5528358778f));
    p = madd(p, t, splat(-0.4642043544f));
    p = madd(p, t, splat(0.4228917418f));
    p = madd(p, t, splat(-0.01248239662f));
    p = madd(p, t, splat(0.1958655789f));
    p = madd(p, t, splat(0.1706077573f));
    p = madd(p, t, splat(0.1887875917f));
    p = madd(p, t, splat(0.1880303332f));
    const vf tail = exp(x * x * splat(-0.5f)) * t * p * splat(0.5f);  // Phi(-|x|)
    const vf phi = x < 0.0f ? tail : 1.0f - tail;
    return x == -__builtin_inff() ? vf{} : x * phi;
  }
};

struct GeluTanh {
  static vf apply(vf x) { return gelu_tanh_of(x); }
};

struct Relu {
  static vf apply(vf x) { return x < 0.0f ? vf{} : x; }  // NaN stays
};

struct ReluSquared {
  static vf apply(vf x) {
    const vf y = Relu::apply(x);
    return y * y;
  }
};

// e^x - 1 for x < 0: a series near 0, where the difference would leave few digits.
HEADRACE_INLINE vf expm1_below(vf x) {
  vf p = splat(1.0f / 40320.0f);
  for (const float next : {1.0f / 5040.0f, 1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f})
    p = madd(p, x, splat(next));
  return x > -0.5f ? madd(p * x, x, x) : exp(x) - 1.0f;
}

// xIELU (arXiv 2411.13010), of a layer's own two numbers: above 0 p x x + x / 2, below n (e^x - 1 - x) + x / 2.
struct Xielu {
  vf p, n;
  vf apply(vf x) const {
    const vf below = x < -1e-6f ? x : splat(-1e-6f), half = x * splat(0.5f);
    return half + (x > 0.0f ? p * x * x : (expm1_below(below) - x) * n);
  }
};

template <typename T, typename F> void map(const Unary &a, F f = {}) {
  const int64_t total = a.rows * a.width, vectors = (total + W - 1) / W;
  const T *x = static_cast<const T *>(a.x);
  T *out = static_cast<T *>(a.out);
  share_ranges(vectors, total > MANY_ELEMENTS ? a.threads : 1, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const int64_t at = i * W, n = total - at;
      if (n >= W) store(out + at, f.apply(load(x + at)));
      else store_part(out + at, f.apply(load_part(x + at, n)), n);
    }
  });
}

}  // namespace

template <typename T> void gelu(const Unary &a) { map<T, Gelu>(a); }
template <typename T> void gelu_tanh(const Unary &a) { map<T, GeluTanh>(a); }
template <typename T> void relu(const Unary &a) { map<T, Relu>(a); }
template <typename T> void relu2(const Unary &a) { map<T, ReluSquared>(a); }
template <typename T> void xielu(const Unary &a) {
  const float *alphas = static_cast<const float *>(a.second);
  map<T>(a, Xielu{splat(alphas[0]), splat(alphas[1])});
}

template <typename T> void add(const Sum &a) {
  const int64_t vectors = (a.elements + W - 1) / W;
  const T *x = static_cast<const T *>(a.x), *y = static_cast<const T *>(a.y);
  T *out = static_cast<T *>(a.out);
  share_ranges(vectors, a.elements > MANY_ELEMENTS ? a.threads : 1, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const int64_t at = i * W, n = a.elements - at;
      vf more = load_up_to(y + at, n);
      if (a.scale != 1.0f) more = round_as(x, more * splat(a.scale));
      store_up_to(out + at, load_up_to(x + at, n) + more, n);
    }
  });
}

template <typename T> void times(const Times &a) {
  share_each(a.rows, a.rows * a.width > MANY_ELEMENTS ? a.threads : 1, [&](int64_t t) {
    const T *x = static_cast<const T *>(a.x) + t * a.x_stride;
    const T *y = a.y ? static_cast<const T *>(a.y) + t * a.y_stride : nullptr;
    T *out = static_cast<T *>(a.out) + t * a.out_stride;
    for (int64_t i = 0; i < a.width; i += W) {
      const int64_t n = a.width - i;
      store_up_to(out + i, load_up_to(x + i, n) * (y ? load_up_to(y + i, n) : splat(a.scale)), n);
    }
  });
}

template <typename T> void embed(const Embed &a) {
  for (int64_t t = 0; t < a.rows; ++t) {
    const T *from = static_cast<const T *>(a.table) + a.index[t] * a.width;
    T *out = static_cast<T *>(a.out) + t * a.width;
    for (int64_t i = 0; i < a.width; i += W)
      store_up_to(out + i, load_up_to(from + i, a.width - i) * splat(a.scale), a.width - i);
  }
}

void soft_cap(float *x, int64_t n, float scale, float cap, int threads) {
  const int64_t vectors = (n + W - 1) / W;
  share_ranges(vectors, n > MANY_ELEMENTS ? threads : 1, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      float *at = x + i * W;
      const int64_t left = n - i * W;
      const vf y = load_up_to(at, left) * splat(scale);
      store_up_to(at, cap == 0.0f ? y : soft_capped(y, cap), left);
    }
  });
}

// f(gate, up) for rows x [T, 2 I] = (gate, up): [T, I]
template <typename T, typename F> static void halves(const Unary &a, F f) {
  const T *const second = static_cast<const T *>(a.second);
  const int64_t stride = second ? a.x_stride : 2 * a.width;
  share_each(a.rows, a.rows * a.width > MANY_ELEMENTS ? a.threads : 1, [&](int64_t t) {
    const T *gate = static_cast<const T *>(a.x) + t * stride, *up = second ? second + t * a.width : gate + a.width;
    T *out = static_cast<T *>(a.out) + t * a.width;
    for (int64_t i = 0; i < a.width; i += W) {
      const int64_t n = a.width - i;
      store_up_to(out + i, f(load_up_to(gate + i, n), load_up_to(up + i, n)), n);
    }
  });
}

template <typename T> void silu_mul(const Unary &a) {
  halves<T>(a, [](vf gate, vf up) HEADRACE_ALWAYS_INLINE { return sigmoid_times(gate, gate) * up; });
}

template <typename T> void gelu_tanh_mul(const Unary &a) {
  halves<T>(a, [](vf gate, vf up) HEADRACE_ALWAYS_INLINE { return gelu_tanh_of(gate) * up; });
}

template <typename T> void swiglu_oai_mul(const Unary &a) {
  halves<T>(a, [](vf gate, vf up) HEADRACE_ALWAYS_INLINE { return swiglu_oai_of(gate, up); });
}

template <typename T> void swiglu_clamped_mul(const Unary &a) {
  halves<T>(a, [](vf gate, vf up) HEADRACE_ALWAYS_INLINE { return swiglu_clamped_of(gate, up); });
}

template <typename T> void sigmoid_mul(const Unary &a) {
  halves<T>(a, [](vf gate, vf up) HEADRACE_ALWAYS_INLINE { return sigmoid_times(up, gate); });
}

// Halves (a, b) of the first `width` elements -> (a cos - b sin, b cos + a sin).
template <typename T> static void rotate(const T *x, T *out, const float *cos_sin, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; i += W) {
    const int64_t n = half - i;
    const vf a = load_up_to(x + i, n), b = load_up_to(x + half + i, n);
    const vf cos = load_up_to(cos_sin + i, n), sin = load_up_to(cos_sin + half + i, n);
    store_up_to(out + i, madd(a, cos, -(b * sin)), n);
    store_up_to(out + half + i, madd(b, cos, a * sin), n);
  }
}

template <typename T> void rotary(const Rotary &a) {
  share_each(a.rows, a.rows * a.heads * a.dim > MANY_ELEMENTS ? a.threads : 1, [&](int64_t t) {
    for (int64_t h = 0; h < a.heads; ++h) {
      const T *x = static_cast<const T *>(a.x) + t * a.x_stride + h * a.dim;
      T *out = static_cast<T *>(a.out) + t * a.out_stride + h * a.dim;
      rotate(x, out, a.cos_sin + t * a.turn_stride, a.rotary);
      if (out != x) memcpy(out + a.rotary, x + a.rotary, (a.dim - a.rotary) * sizeof(T));
    }
  });
}

void exp(const float *x, float *out, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store_up_to(out + i, exp(load_up_to(x + i, n - i)), n - i);
}

HEADRACE_BOTH_TYPES(gelu, Unary)
HEADRACE_BOTH_TYPES(gelu_tanh, Unary)
HEADRACE_BOTH_TYPES(relu, Unary)
HEADRACE_BOTH_TYPES(relu2, Unary)
HEADRACE_BOTH_TYPES(xielu, Unary)
HEADRACE_BOTH_TYPES(add, Sum)
HEADRACE_BOTH_TYPES(times, Times)
HEADRACE_BOTH_TYPES(embed, Embed)
HEADRACE_BOTH_TYPES(silu_mul, Unary)
HEADRACE_BOTH_TYPES(gelu_tanh_mul, Unary)
HEADRACE_BOTH_TYPES(swiglu_oai_mul, Unary)
HEADRACE_BOTH_TYPES(swiglu_clamped_mul, Unary)
HEADRACE_BOTH_TYPES(sigmoid_mul, Unary)
HEADRACE_BOTH_TYPES(rotary, Rotary)

}  // namespace headrace::HEADRACE_NS
