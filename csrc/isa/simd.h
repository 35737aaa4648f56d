// Vectors of W floats with one multiply-add, one exp and one rounding to bf16 for all kernels of an instruction set.
//
// Every operation is elementwise and exactly rounded, so a value depends neither on W nor on its place in a vector.
// This file is compiled once per instruction set: keep the C++ library's templates out of it, because the linker keeps
// one copy of each and may pick the one that needs AVX-512.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __FMA__
#include <immintrin.h>
#endif

namespace headrace::HEADRACE_NS {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;  // of vectors
#else
constexpr int REGISTERS = 16;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int16_t vs __attribute__((vector_size(2 * W)));
typedef int8_t vb __attribute__((vector_size(W)));

typedef uint8_t byte;
typedef uint16_t bf16;

// The two types in which a kernel is made.
#define HEADRACE_BOTH_TYPES(name, Arguments)   \
  template void name<bf16>(const Arguments &); \
  template void name<float>(const Arguments &);

#define HEADRACE_INLINE static inline __attribute__((always_inline))

// For inner loops that need all registers: inlined into a long function they may be given fewer. They begin with a cache line,
// lest their speed depend on what else is linked (by a seventh, products of few rows with AMX).
#define HEADRACE_APART __attribute__((noinline, aligned(64)))
#define HEADRACE_ALWAYS_INLINE __attribute__((always_inline))

template <int I> struct Constant {
  constexpr operator int() const { return I; }
};

template <typename F, int... I> HEADRACE_INLINE void each_of(F &f, std::integer_sequence<int, I...>) {
  (f(Constant<I>{}), ...);
}

// f(0), f(1), .. f(N - 1) with constant arguments. An array of vectors whose every index is constant from the start stays
// in registers; one that is indexed in a loop, unrolled or not, GCC 12 may keep or clear in memory (by `rep stos`).
template <int N, typename F> HEADRACE_INLINE void each(F f) { each_of(f, std::make_integer_sequence<int, N>{}); }

// Statements for i = 0 .. N - 1, N <= 8, with i a constant: what `each` does, for the inner loops of tiles, of which there are
// hundreds. Without a function for each i, which is made only to be inlined, they compile in half the time.
#define HEADRACE_EACH(i, N, ...)                                                                      \
  do {                                                                                                \
    static_assert((N) <= 8);                                                                          \
    HEADRACE_ONE(i, 0, N, __VA_ARGS__) HEADRACE_ONE(i, 1, N, __VA_ARGS__)                             \
    HEADRACE_ONE(i, 2, N, __VA_ARGS__) HEADRACE_ONE(i, 3, N, __VA_ARGS__)                             \
    HEADRACE_ONE(i, 4, N, __VA_ARGS__) HEADRACE_ONE(i, 5, N, __VA_ARGS__)                             \
    HEADRACE_ONE(i, 6, N, __VA_ARGS__) HEADRACE_ONE(i, 7, N, __VA_ARGS__)                             \
  } while (0)
#define HEADRACE_ONE(i, I, N, ...)           \
  if constexpr ((N) > I) {                   \
    [[maybe_unused]] constexpr int i = I;    \
    __VA_ARGS__;                             \
  }

// f(Constant<L>) for the least L of 0, 1, 2, 4 .. MOST that is not below `lines`.
template <int MOST, typename F> HEADRACE_INLINE void with_lines(int lines, F f) {
  if constexpr (MOST > 0)
    if (lines <= MOST / 2) return with_lines<MOST / 2>(lines, f);
  f(Constant<MOST>{});
}

HEADRACE_INLINE vf splat(float x) { return x - vf{}; }

// a * b + c: fused where the instruction set can, two roundings where it cannot. Nothing else may multiply and add.
HEADRACE_INLINE vf madd(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_fmadd_ps(a, b, c));
#elif defined(__FMA__)
  return reinterpret_cast<vf>(_mm256_fmadd_ps(a, b, c));
#else
  return a * b + c;
#endif
}

HEADRACE_INLINE vf max(vf a, vf b) { return a > b ? a : b; }

HEADRACE_INLINE vf load(const float *p) {
  vf x;
  memcpy(&x, p, sizeof x);
  return x;
}

HEADRACE_INLINE vf load(const bf16 *p) {
  vh x;
  memcpy(&x, p, sizeof x);
  return reinterpret_cast<vf>(__builtin_convertvector(x, vu) << 16);
}

HEADRACE_INLINE vf load(const int8_t *p) {
#if defined(__AVX512F__)
  const __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  return reinterpret_cast<vf>(_mm512_cvtepi32_ps(x));
#elif defined(__AVX2__)
  const __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
  return reinterpret_cast<vf>(_mm256_cvtepi32_ps(x));
#else
  vb x;
  memcpy(&x, p, sizeof x);
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(x, vs), vi), vf);  // GCC: 1 step is slow
#endif
}

// 2 W numbers as two vectors, in the order that costs least: of bf16 the even ones, then the odd ones.
template <typename T> HEADRACE_INLINE void load_two(const T *p, vf &first, vf &second) {
  first = load(p);
  second = load(p + W);
}

HEADRACE_INLINE void load_two(const bf16 *p, vf &first, vf &second) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  vu pairs;
  memcpy(&pairs, p, sizeof pairs);
  first = reinterpret_cast<vf>(pairs << 16);
  second = reinterpret_cast<vf>(pairs & 0xffff0000u);
}

// What load_two made of numbers of this type, or sums of it, as the numbers lie in memory.
template <typename T> HEADRACE_INLINE void in_order(const T *, vf &, vf &) {}

HEADRACE_INLINE void in_order(const bf16 *, vf &first, vf &second) {
  const vf even = first, odd = second;
#if defined(__AVX512F__)
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  first = reinterpret_cast<vf>(_mm512_permutex2var_ps(even, low, odd));
  second = reinterpret_cast<vf>(_mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd));
#elif defined(__AVX2__)
  const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  first = reinterpret_cast<vf>(_mm256_permute2f128_ps(low, high, 0x20));
  second = reinterpret_cast<vf>(_mm256_permute2f128_ps(low, high, 0x31));
#else
  first = vf{even[0], odd[0], even[1], odd[1]};
  second = vf{even[2], odd[2], even[3], odd[3]};
#endif
}

HEADRACE_INLINE void store(float *p, vf x) { memcpy(p, &x, sizeof x); }

// Whole numbers, in two steps: GCC takes a single one by scalars.
HEADRACE_INLINE void store(int8_t *p, vf x) {
  const vb codes = __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(x, vi), vs), vb);
  memcpy(p, &codes, sizeof codes);
}

// Upper halves of x rounded to nearest even, still in 32 bits; a NaN stays a NaN.
HEADRACE_INLINE vu bf16_bits(vf x) {
  const vu u = reinterpret_cast<vu>(x);
  const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return x == x ? rounded : (u >> 16) | 0x40u;
}

#if defined(__AVX512BF16__)
// The processor's own rounding makes 0 of subnormal numbers, and is otherwise the same.
HEADRACE_INLINE bool rounds_itself(vf x) {
  return __builtin_expect(_mm512_fpclass_ps_mask(reinterpret_cast<__m512>(x), 0x20) == 0, 1);
}

HEADRACE_INLINE vh to_bf16(vf x) {
  if (rounds_itself(x)) return reinterpret_cast<vh>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
  return __builtin_convertvector(bf16_bits(x), vh);
}
#else
HEADRACE_INLINE vh to_bf16(vf x) { return __builtin_convertvector(bf16_bits(x), vh); }
#endif

HEADRACE_INLINE void store(bf16 *p, vf x) {
  const vh h = to_bf16(x);
  memcpy(p, &h, sizeof h);
}

// x rounded to the type of the tensor it came with.
HEADRACE_INLINE vf round_as(const float *, vf x) { return x; }
HEADRACE_INLINE vf round_as(const bf16 *, vf x) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<vf>(__builtin_convertvector(to_bf16(x), vu) << 16);
#else
  return reinterpret_cast<vf>(bf16_bits(x) << 16);
#endif
}

// Sanitizers do not look into masked loads and stores: with them the general form below is used.
#if defined(__AVX512F__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
HEADRACE_INLINE vf load_part(const float *p, int64_t n) {
  return reinterpret_cast<vf>(_mm512_maskz_loadu_ps((1u << n) - 1, p));
}

HEADRACE_INLINE void store_part(float *p, vf x, int64_t n) {
  _mm512_mask_storeu_ps(p, (1u << n) - 1, reinterpret_cast<__m512>(x));
}
#endif

// The first n <= W elements; the others are 0.
template <typename T> HEADRACE_INLINE vf load_part(const T *p, int64_t n) {
  T part[W] = {};
  memcpy(part, p, n * sizeof(T));
  return load(part);
}

template <typename T> HEADRACE_INLINE void store_part(T *p, vf x, int64_t n) {
  T part[W];
  store(part, x);
  memcpy(p, part, n * sizeof(T));
}

// The number that has these bits.
HEADRACE_INLINE float number(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// W elements, or the first n if these are fewer.
template <typename T> HEADRACE_INLINE vf load_up_to(const T *p, int64_t n) { return n >= W ? load(p) : load_part(p, n); }
template <typename T> HEADRACE_INLINE void store_up_to(T *p, vf x, int64_t n) { n >= W ? store(p, x) : store_part(p, x, n); }

// n numbers as fp32.
template <typename T> HEADRACE_INLINE void widen(const T *from, float *to, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  if (i < n) store_part(to + i, load_part(from + i, n - i), n - i);
}

// e^x: at most 2 ulp from the truth; 1 at 0; 0 below -87.33 (results that would be subnormal), inf above 88.72.
// x = n ln 2 + r with |r| <= ln 2 / 2; the coefficients are a Chebyshev fit of (e^r - 1 - r) / r^2.
// Of N vectors side by side, since each operation waits for the one before.
template <int N> HEADRACE_INLINE void exp(vf (&x)[N]) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf shifted[N], n[N], r[N], y[N];
  HEADRACE_EACH(i, N, shifted[i] = madd(x[i], splat(1.44269504f), magic));
  HEADRACE_EACH(i, N, n[i] = shifted[i] - magic);
  HEADRACE_EACH(i, N, r[i] = madd(n[i], splat(-0.693359375f), x[i]));  // exact: 9 bits
  HEADRACE_EACH(i, N, r[i] = madd(n[i], splat(2.12194440e-4f), r[i]));
  HEADRACE_EACH(i, N, y[i] = splat(1.989099082e-4f));
  const auto times_r_plus = [&](float next)
                                HEADRACE_ALWAYS_INLINE { HEADRACE_EACH(i, N, y[i] = madd(y[i], r[i], splat(next))); };
  times_r_plus(1.393365000e-3f);
  times_r_plus(8.333310925e-3f);
  times_r_plus(4.166646493e-2f);
  times_r_plus(1.666666668e-1f);
  times_r_plus(5.000000013e-1f);
  HEADRACE_EACH(i, N, y[i] = y[i] * r[i]);
  HEADRACE_EACH(i, N, y[i] = madd(y[i], r[i], r[i]));
  HEADRACE_EACH(i, N, {
    const vu scaled = reinterpret_cast<vu>(y[i] + 1.0f) + (reinterpret_cast<vu>(shifted[i]) << 23);  // may wrap: large x
    y[i] = x[i] < -87.33f ? vf{} : reinterpret_cast<vf>(scaled);
    y[i] = x[i] > 88.72f ? splat(__builtin_inff()) : y[i];
    x[i] = x[i] == x[i] ? y[i] : x[i];
  });
}

HEADRACE_INLINE vf exp(vf x) {
  vf one[1] = {x};
  exp(one);
  return *one;
}

HEADRACE_INLINE float exp(float x) { return exp(splat(x))[0]; }

// x times the sigmoid of y.
HEADRACE_INLINE vf sigmoid_times(vf x, vf y) { return x / (exp(-y) + 1.0f); }

// x (1 + tanh y) / 2 = x sigmoid(2 y) with y = sqrt(2 / pi) (x + 0.044715 x^3)
HEADRACE_INLINE vf gelu_tanh_of(vf x) {
  const vf cubic = madd(x * x * x, splat(0.044715f), x);
  return x == -__builtin_inff() ? vf{} : sigmoid_times(x, cubic * splat(1.5957691f));
}

// gpt-oss's gated unit: gate sigmoid(1.702 gate) (up + 1), gates held to 7 at most, ups to -7 .. 7; NaN stays.
HEADRACE_INLINE vf swiglu_oai_of(vf gate, vf up) {
  constexpr float ALPHA = 1.702f, LIMIT = 7.0f;
  gate = gate > LIMIT ? splat(LIMIT) : gate;
  up = up > LIMIT ? splat(LIMIT) : up < -LIMIT ? splat(-LIMIT) : up;
  return sigmoid_times(gate, gate * splat(ALPHA)) * (up + 1.0f);
}

// silu(gate) up, gates held to 10 at most, ups to -10 .. 10; NaN stays.
HEADRACE_INLINE vf swiglu_clamped_of(vf gate, vf up) {
  constexpr float LIMIT = 10.0f;
  gate = gate > LIMIT ? splat(LIMIT) : gate;
  up = up > LIMIT ? splat(LIMIT) : up < -LIMIT ? splat(-LIMIT) : up;
  return sigmoid_times(gate, gate) * up;
}

// cap tanh(x / cap), with tanh y = (1 - e^-2y) / (1 + e^-2y); NaN stays.
HEADRACE_INLINE vf soft_capped(vf x, float cap) {
  const vf size = x < 0.0f ? -x : x, e = exp(size * splat(-2.0f / cap));
  const vf y = splat(cap) * (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -y : x == x ? y : x;
}

// The greatest element of x.
HEADRACE_INLINE float greatest(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x));
#elif defined(__AVX2__)
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float m = x[0];
  for (int i = 1; i < W; ++i) m = x[i] > m ? x[i] : m;
  return m;
#endif
}

// Whether any element is not 0.
HEADRACE_INLINE bool any(vi x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(x)) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(x));
#else
  for (int i = 0; i < W; ++i)
    if (x[i]) return true;
  return false;
#endif
}

#if defined(__AVX2__)
// The sum of 8 numbers, by halves.
HEADRACE_INLINE float sum8(__m256 eight) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#endif

#if defined(__AVX512F__)
HEADRACE_INLINE float sum16(__m512 lane) {
  return sum8(_mm256_add_ps(_mm512_castps512_ps256(lane), _mm512_extractf32x8_ps(lane, 1)));
}
#endif

// The sum of 64 numbers in one fixed order, whatever W is: 16 lanes over 4 steps, then halves.
HEADRACE_INLINE float sum64(const float *x) {
  const auto lanes = [x](int i) HEADRACE_ALWAYS_INLINE {
    return ((load(x + i) + load(x + i + 16)) + load(x + i + 32)) + load(x + i + 48);
  };
#if defined(__AVX512F__)
  return sum16(reinterpret_cast<__m512>(lanes(0)));
#elif defined(__AVX2__)
  return sum8(lanes(0) + lanes(8));
#else
  float lane[16];
  for (int i = 0; i < 16; i += W) store(lane + i, lanes(i));
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
#endif
}

}  // namespace headrace::HEADRACE_NS
