// What the log probability of one element of each row is made of, in fp64. R: rows, N: elements of a row.
//
// Sums run over 32 lanes (element i goes to lane i % 32), which are then added by halves: one order for every W.
#include "common/shares.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t MANY_EXPONENTS = 65536;  // elements below which waking the other threads costs more than it saves
constexpr int SUM_LANES = 32;              // lanes
constexpr int D = W / 2;                   // doubles in a vector

typedef double vd __attribute__((vector_size(8 * D)));
typedef uint64_t vq __attribute__((vector_size(8 * D)));
typedef float vhalf __attribute__((vector_size(4 * D)));

vd splat_wide(double x) { return x - vd{}; }

HEADRACE_INLINE vd madd_wide(vd a, vd b, vd c) {
#if defined(__AVX512F__)
  return reinterpret_cast<vd>(_mm512_fmadd_pd(a, b, c));
#elif defined(__FMA__)
  return reinterpret_cast<vd>(_mm256_fmadd_pd(a, b, c));
#else
  return a * b + c;
#endif
}

HEADRACE_INLINE vd load_wide(const float *p) {
  vhalf x;
  memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, vd);
}

// e^x for -700 <= x <= 0, at most 1e-14 of it from the truth. x = n ln 2 + r with |r| <= ln 2 / 2, and a Taylor series.
template <int N> HEADRACE_INLINE void exp_wide(vd (&x)[N]) {
  const vd magic = splat_wide(6755399441055744.0);  // 1.5 * 2^52: adding it rounds to an integer
  vd shifted[N], n[N], r[N], y[N];
  HEADRACE_EACH(i, N, shifted[i] = madd_wide(x[i], splat_wide(1.4426950408889634), magic));
  HEADRACE_EACH(i, N, n[i] = shifted[i] - magic);
  HEADRACE_EACH(i, N, r[i] = madd_wide(n[i], splat_wide(-6.93147180369123816490e-01), x[i]));  // exact: 33 bits
  HEADRACE_EACH(i, N, r[i] = madd_wide(n[i], splat_wide(-1.90821492927058770002e-10), r[i]));
  HEADRACE_EACH(i, N, y[i] = splat_wide(1.0 / 39916800));
  const auto times_r_plus = [&](double next)
                                HEADRACE_ALWAYS_INLINE { HEADRACE_EACH(i, N, y[i] = madd_wide(y[i], r[i], splat_wide(next))); };
  times_r_plus(1.0 / 3628800);
  times_r_plus(1.0 / 362880);
  times_r_plus(1.0 / 40320);
  times_r_plus(1.0 / 5040);
  times_r_plus(1.0 / 720);
  times_r_plus(1.0 / 120);
  times_r_plus(1.0 / 24);
  times_r_plus(1.0 / 6);
  times_r_plus(0.5);
  times_r_plus(1.0);
  times_r_plus(1.0);
  HEADRACE_EACH(i, N, x[i] = reinterpret_cast<vd>(reinterpret_cast<vq>(y[i]) + (reinterpret_cast<vq>(shifted[i]) << 52)));
}

// Adds e^(x - top) of 32 elements to the lanes. What is less than e^-700 is lost beside the 1 of the greatest anyway.
HEADRACE_INLINE void add_exponents(const float *x, vd top, vd (&lanes)[SUM_LANES / D]) {
  HEADRACE_EACH(group, SUM_LANES / D / 4, {
    vd y[4];
    HEADRACE_EACH(i, 4, y[i] = load_wide(x + (4 * group + i) * D) - top);
    HEADRACE_EACH(i, 4, y[i] = y[i] > -700.0 ? y[i] : splat_wide(-700.0));
    exp_wide(y);
    HEADRACE_EACH(i, 4, lanes[4 * group + i] += y[i]);
  });
}

HEADRACE_APART double sum_of(const float *x, int64_t n, float greatest) {
  const vd top = splat_wide(greatest);
  vd lanes[SUM_LANES / D] = {};
  int64_t i = 0;
  for (; i + SUM_LANES <= n; i += SUM_LANES) add_exponents(x + i, top, lanes);
  if (i < n) {
    float rest[SUM_LANES];
    for (int j = 0; j < SUM_LANES; ++j) rest[j] = i + j < n ? x[i + j] : -__builtin_inff();
    add_exponents(rest, top, lanes);
  }
  double sums[SUM_LANES];
  memcpy(sums, lanes, sizeof sums);
  for (int half = SUM_LANES / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  return sums[0];
}

// The greatest element; NaN if one is.
float greatest_or_nan(const float *x, int64_t n) {
  vf best = splat(-__builtin_inff());
  vi lost = {};
  const auto look = [&](vf y) HEADRACE_ALWAYS_INLINE {
    lost |= y != y;
    best = max(best, y);
  };
  int64_t i = 0;
  for (; i + W <= n; i += W) look(load(x + i));
  for (; i < n; ++i) look(splat(x[i]));
  return any(lost) ? __builtin_nanf("") : greatest(best);
}

int64_t count_above(const float *x, int64_t n, float bound) {
  vi above = {};
  int64_t i = 0, count = 0;
  for (; i + W <= n; i += W) above -= load(x + i) > splat(bound);
  for (; i < n; ++i) count += x[i] > bound;
  for (int j = 0; j < W; ++j) count += above[j];
  return count;
}

}  // namespace

void softmax_sums(const SoftmaxSums &a) {
  share_each(a.rows, a.rows * a.width > MANY_EXPONENTS ? a.threads : 1, [&](int64_t row) {
    const float *x = a.x + row * a.width;
    a.greatest[row] = greatest_or_nan(x, a.width);
    a.sum[row] = sum_of(x, a.width, a.greatest[row]);
    a.above[row] = count_above(x, a.width, x[a.target[row]]);
  });
}

}  // namespace headrace::HEADRACE_NS
