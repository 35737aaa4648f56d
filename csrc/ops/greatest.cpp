// The greatest element of each row. R: rows, N: elements of a row.
#include "common/shares.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t STRETCH = 1024;       // elements that are looked at together
constexpr int64_t MANY_LOGITS = 65536;  // elements below which waking the other threads costs more than it saves

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
  return any(above);
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

// The same for all rows where the greatest of each block is known: the first block that has the row's greatest is looked at.
void find_by_tops(const Greatest &a) {
  const int64_t stride = tops_width(a.rows), blocks = (a.width + TOPS - 1) / TOPS;
  for (int64_t first = 0; first < a.rows; first += W) {
    vf best = load(a.tops + first);
    vi block = {};
    for (int64_t i = 1; i < blocks; ++i) {
      const vf x = load(a.tops + i * stride + first);
      const vi more = ~(x <= best) & (best == best);
      best = more ? x : best;
      block = more ? vi{} + static_cast<int>(i) : block;
    }
    for (int64_t r = 0; r < W && first + r < a.rows; ++r) {
      const int64_t begin = block[r] * TOPS, left = a.width - begin;
      const Found found = look(a.x + (first + r) * a.width + begin, left < TOPS ? left : TOPS);
      a.value[first + r] = found.value;
      a.index[first + r] = begin + found.at;
    }
  }
}

}  // namespace

void greatest(const Greatest &a) {
  if (a.tops) return find_by_tops(a);
  share_out(a.rows, a.rows * a.width > MANY_LOGITS ? a.threads : 1, [&](int64_t row) {
    const Found found = greatest_of(a.x + row * a.width, a.width);
    a.value[row] = found.value;
    a.index[row] = found.at;
  });
}

}  // namespace headrace::HEADRACE_NS
