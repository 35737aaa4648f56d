// The greatest element of each row. R: rows, N: elements of a row.
#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t STRETCH = 1024;    // elements that are looked at together
constexpr int64_t PARALLEL = 65536;  // elements below which waking the other threads costs more than it saves

struct Found {
  float value;
  int64_t at;
};

// The first of the greatest among x[0 .. n-1]; the first NaN if there is one.
Found look(const float *x, int64_t n) {
  Found found = {x[0], 0};
  for (int64_t i = 1; i < n && found.value == found.value; ++i)
    if (x[i] > found.value || x[i] != x[i]) found = {x[i], i};
  return found;
}

// Whether a stretch has an element above `value`, or a NaN.
bool exceeds(const float *x, float value) {
  const vf bound = splat(value);
  vi above = {};
  for (int64_t i = 0; i < STRETCH; i += W) above |= ~(load(x + i) <= bound);
  for (int i = 0; i < W; ++i)
    if (above[i]) return true;
  return false;
}

Found greatest_of(const float *x, int64_t n) {
  Found best = look(x, n < STRETCH ? n : STRETCH);
  for (int64_t i = STRETCH; i < n && best.value == best.value; i += STRETCH) {
    if (n - i >= STRETCH && !exceeds(x + i, best.value)) continue;
    const Found here = look(x + i, n - i < STRETCH ? n - i : STRETCH);
    if (!(here.value <= best.value)) best = {here.value, i + here.at};
  }
  return best;
}

}  // namespace

void greatest(const Greatest &a) {
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows > 1 && a.rows * a.width > PARALLEL)
  for (int64_t row = 0; row < a.rows; ++row) {
    const Found found = greatest_of(a.x + row * a.width, a.width);
    a.value[row] = found.value;
    a.index[row] = found.at;
  }
}

}  // namespace headrace::HEADRACE_NS
