// Which experts a row goes to, and the sum of what they make of it. A row's bits depend on that row alone.
//
// R: rows, N: experts, H: hidden size.
#include "common/arena.h"
#include "common/shares.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t MANY_SCORES = 16384, MANY_SUMS = 16384;  // elements below which waking the other threads costs more

// p = e^(x - top) / their sum, added up by ascending place. What is not a number makes all of them so.
void softmax(const float *x, int64_t n, float *p) {
  float top = x[0], sum = 0;
  for (int64_t i = 1; i < n; ++i) top = x[i] > top ? x[i] : top;
  for (int64_t i = 0; i < n; i += W) store_up_to(p + i, exp(load_up_to(x + i, n - i) - splat(top)), n - i);
  for (int64_t i = 0; i < n; ++i) sum += p[i];
  for (int64_t i = 0; i < n; ++i) p[i] /= sum;
}

// The greatest of p, the first of equal ones, which is set to `taken`. Always one that was not taken before, whatever p holds.
int32_t take_greatest(float *p, bool *taken, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i)
    if (!taken[i] && (best < 0 || p[i] > p[best])) best = i;
  taken[best] = true;
  return static_cast<int32_t>(best);
}

void choose(const Route &a, int64_t row) {
  Scratch memory = arena(room<float>(a.experts) + room<bool>(a.experts));
  float *p = memory.take<float>(a.experts), *share = a.share + row * a.chosen, sum = 0;
  bool *taken = memory.take<bool>(a.experts);
  softmax(a.x + row * a.experts, a.experts, p);
  memset(taken, 0, a.experts * sizeof(bool));
  for (int64_t j = 0; j < a.chosen; ++j) {
    const int32_t expert = take_greatest(p, taken, a.experts);
    a.expert[row * a.chosen + j] = expert;
    sum += share[j] = p[expert];
  }
  for (int64_t j = 0; a.normalised && j < a.chosen; ++j) share[j] /= sum;
}

}  // namespace

void route(const Route &a) {
  share_each(a.rows, a.rows * a.experts > MANY_SCORES ? a.threads : 1, [&](int64_t row) { choose(a, row); });
}

template <typename T> void combine(const Combine &a) {
  const T *y = static_cast<const T *>(a.y), *residual = static_cast<const T *>(a.residual);
  T *out = static_cast<T *>(a.out);
  share_each(a.rows, a.rows * a.chosen * a.width > MANY_SUMS ? a.threads : 1, [&](int64_t row) {
    const int32_t *place = a.place + row * a.chosen;
    const float *share = a.share + row * a.chosen;
    for (int64_t c = 0; c < a.width; c += W) {
      const int64_t n = a.width - c, at = row * a.width + c;
      vf sum = {};
      for (int64_t j = 0; j < a.chosen; ++j) sum = madd(load_up_to(y + place[j] * a.width + c, n), splat(share[j]), sum);
      if (residual) sum = load_up_to(residual + at, n) + round_as(residual, sum);
      store_up_to(out + at, sum, n);
    }
  });
}

HEADRACE_BOTH_TYPES(combine, Combine)

}  // namespace headrace::HEADRACE_NS
