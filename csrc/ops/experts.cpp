// Which experts a row goes to, and the sum of what they make of it. A row's bits depend on that row alone.
//
// R: rows, N: experts, H: hidden size.
#include "common/arena.h"
#include "common/shares.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr float LEAST_SUM = 1e-20f;                        // DeepSeek-V3's: sigmoids may all be 0
constexpr int64_t MANY_SCORES = 16384, MANY_SUMS = 16384;  // elements below which waking the other threads costs more

// p = e^(x - top) / their sum, added up by ascending place. What is not a number makes all of them so.
void softmax(const float *x, int64_t n, float *p) {
  float top = x[0], sum = 0;
  for (int64_t i = 1; i < n; ++i) top = x[i] > top ? x[i] : top;
  for (int64_t i = 0; i < n; i += W) store_up_to(p + i, exp(load_up_to(x + i, n - i) - splat(top)), n - i);
  for (int64_t i = 0; i < n; ++i) sum += p[i];
  for (int64_t i = 0; i < n; ++i) p[i] /= sum;
}

void sigmoid(const float *x, int64_t n, float *p) {
  for (int64_t i = 0; i < n; i += W) store_up_to(p + i, sigmoid_times(splat(1.0f), load_up_to(x + i, n - i)), n - i);
}

// The greatest of p, the first of equal ones, which is set to `taken`. Always one that was not taken before, whatever p holds.
int32_t take_greatest(const float *p, bool *taken, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i)
    if (!taken[i] && (best < 0 || p[i] > p[best])) best = i;
  taken[best] = true;
  return static_cast<int32_t>(best);
}

// How good a group of n experts is. Leaves none of them taken.
float worth(const float *p, bool *taken, int64_t n, int64_t summed) {
  float sum = 0;
  for (int64_t i = 0; i < summed; ++i) sum += p[take_greatest(p, taken, n)];
  memset(taken, 0, n * sizeof(bool));
  return sum;
}

// Takes all experts but those of the best groups. worths, met [groups]: memory.
void close_groups(const Routing &routing, const float *p, bool *taken, int64_t experts, float *worths, bool *met) {
  const int64_t size = experts / routing.groups;
  for (int64_t g = 0; g < routing.groups; ++g) worths[g] = worth(p + g * size, taken + g * size, size, routing.summed);
  memset(met, 0, routing.groups * sizeof(bool));
  for (int64_t i = 0; i < routing.met_groups; ++i) take_greatest(worths, met, routing.groups);
  for (int64_t g = 0; g < routing.groups; ++g) memset(taken + g * size, !met[g], size * sizeof(bool));
}

void choose(const Route &a, int64_t row) {
  const int64_t n = a.experts, groups = a.routing.groups;
  Scratch memory = arena(2 * room<float>(n) + room<bool>(n) + room<float>(groups) + room<bool>(groups));
  float *p = memory.take<float>(n), *score = memory.take<float>(n), *worths = memory.take<float>(groups);
  float *share = a.share + row * a.chosen, sum = 0;
  bool *taken = memory.take<bool>(n), *met = memory.take<bool>(groups);
  (a.routing.sigmoid ? sigmoid : softmax)(a.x + row * n, n, p);
  for (int64_t i = 0; i < n; ++i) score[i] = a.correction ? p[i] + a.correction[i] : p[i];
  memset(taken, 0, n * sizeof(bool));
  if (groups > 1) close_groups(a.routing, score, taken, n, worths, met);
  for (int64_t j = 0; j < a.chosen; ++j) {
    const int32_t expert = take_greatest(score, taken, n);
    a.expert[row * a.chosen + j] = expert;
    sum += share[j] = p[expert];
  }
  for (int64_t j = 0; j < a.chosen; ++j) share[j] = (a.normalised ? share[j] / (sum + LEAST_SUM) : share[j]) * a.routing.scale;
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
