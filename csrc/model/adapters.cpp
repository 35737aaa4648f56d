#include "model/adapters.h"

#include <cstring>

#include "common/arena.h"
#include "common/shares.h"

namespace headrace {

using HEADRACE_NS::room;
using HEADRACE_NS::Scratch;

namespace {

constexpr int64_t MANY_ELEMENTS = 16384;  // copied or added: below, waking the other threads costs more than it saves

int sharing(const Operations &run, int64_t elements) { return elements > MANY_ELEMENTS ? run.threads : 1; }

// The rows of x that have adapters, in their order.
const bf16 *sorted_rows(const Operations &run, const bf16 *x, int64_t width, Scratch &memory) {
  const AdaptedRows &rows = *run.adapted;
  if (rows.whole) return x;
  bf16 *sorted = memory.take<bf16>(rows.size() * width);
  HEADRACE_NS::share_each(rows.size(), sharing(run, rows.size() * width),
                          [&](int64_t i) { memcpy(sorted + i * width, x + rows.order[i] * width, width * sizeof(bf16)); });
  return sorted;
}

void add_row(const Operations &run, const bf16 *change, bf16 *y, int64_t width) {
  run.kernels.add[Operations::BF16]({y, change, y, width, 1});
}

void add_row(const Operations &, const bf16 *change, float *y, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    const uint32_t bits = static_cast<uint32_t>(change[i]) << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    y[i] += value;
  }
}

// y [T, outputs], bf16 or fp32, rows `stride` apart, += what the rows' adapters make of x, in bf16.
template <typename T> void add_low_rank(const Operations &run, const Matrix &m, const bf16 *x, T *y, int64_t stride,
                                        Scratch memory) {
  const AdaptedRows &rows = *run.adapted;
  const LowRank &own = *m.adapters;
  const int64_t count = rows.size(), outputs = m.outputs;
  const bf16 *from = sorted_rows(run, x, m.inputs, memory);
  bf16 *inner = memory.take<bf16>(count * own.rank), *change = memory.take<bf16>(count * outputs);
  multiply_groups(run.kernels, own.down, rows.begin,
                  {Operations::BF16, from, count, m.inputs, inner, false, run.threads, {}, own.rank});
  multiply_groups(run.kernels, own.up, rows.begin,
                  {Operations::BF16, inner, count, own.rank, change, false, run.threads, {}, outputs});
  for (size_t e = 0; e < own.up.size(); ++e) {
    const int64_t first = rows.begin[e], size = rows.begin[e + 1] - first;
    if (own.up[e].outputs == 0) continue;
    HEADRACE_NS::share_each(size, sharing(run, size * outputs), [&](int64_t i) {
      add_row(run, change + (first + i) * outputs, y + rows.order[first + i] * stride, outputs);
    });
  }
}

// x times the matrix alone, rows of y `stride` apart.
void multiply_plain(const Operations &run, const Matrix &m, const bf16 *x, bf16 *y, int64_t stride) {
  multiply(run.kernels, m, {Operations::BF16, x, run.rows, m.inputs, y, false, run.threads, {}, stride});
}

// made [T, 2 width], 64 of the first half, then 64 of the second, and so on -> the first half, then the second.
void by_halves(const Operations &run, const bf16 *made, bf16 *y, int64_t width) {
  HEADRACE_NS::share_each(run.rows, sharing(run, run.rows * 2 * width), [&](int64_t t) {
    const bf16 *from = made + t * 2 * width;
    for (int64_t column = 0; column < width; column += TOPS)
      for (int64_t half = 0; half < 2; ++half, from += TOPS)
        memcpy(y + (2 * t + half) * width + column, from, TOPS * sizeof(bf16));
  });
}

}  // namespace

AdaptedRows::AdaptedRows(const int64_t *numbers, int64_t rows, int64_t adapters, void *scratch)
    : begin(adapters + 1), scratch(scratch) {
  for (int64_t t = 0; t < rows; ++t) {
    if (numbers[t] < -1 || numbers[t] >= adapters) refuse("row ", t, " has adapter ", numbers[t], ", of ", adapters);
    if (numbers[t] >= 0) ++begin[numbers[t] + 1];
  }
  for (int64_t e = 0; e < adapters; ++e) begin[e + 1] += begin[e];
  order.resize(begin[adapters]);
  std::vector<int64_t> next = begin;
  for (int64_t t = 0; t < rows; ++t)
    if (numbers[t] >= 0) order[next[numbers[t]]++] = t;
  whole = size() == rows;
  for (int64_t i = 0; i < size(); ++i) whole &= order[i] == i;
}

int64_t low_rank_scratch(const Matrix &m, int64_t rows) {
  if (!m.adapters) return 0;
  // Beside the change there is what the matrix made: where a residual is added, or twice where a gate turns it.
  return room<bf16>(rows * m.inputs) + room<bf16>(rows * m.adapters->rank) + (m.gated ? 3 : 2) * room<bf16>(rows * m.outputs);
}

void multiply_adapted(const Operations &run, const Matrix &m, const bf16 *x, bf16 *y, const bf16 *residual, float scale) {
  Scratch memory(run.adapted->scratch);
  bf16 *made = residual ? memory.take<bf16>(run.rows * m.outputs) : y;
  multiply_plain(run, m, x, made, m.outputs);
  add_low_rank(run, m, x, made, m.outputs, memory);
  if (residual) run.kernels.add[Operations::BF16]({residual, made, y, run.rows * m.outputs, run.threads, scale});
}

void multiply_adapted_apart(const Operations &run, const Matrix &m, const bf16 *x, bf16 *y, int64_t stride) {
  multiply_plain(run, m, x, y, stride);
  add_low_rank(run, m, x, y, stride, Scratch(run.adapted->scratch));
}

void multiply_adapted_wide(const Operations &run, const Matrix &m, const bf16 *x, float *y) {
  run.multiply(m, x, y, {}, true);
  add_low_rank(run, m, x, y, m.outputs, Scratch(run.adapted->scratch));
}

void multiply_adapted_gated(const Operations &run, const Matrix &up, Activation f, const bf16 *x, bf16 *y, int64_t width,
                            float scale) {
  Scratch memory(run.adapted->scratch);
  Matrix plain = up;
  plain.gated = false;
  if (up.bias) plain.bias = up.adapters->turned.data();
  bf16 *made = memory.take<bf16>(run.rows * up.outputs), *halves = memory.take<bf16>(run.rows * up.outputs);
  multiply_plain(run, plain, x, made, up.outputs);
  by_halves(run, made, halves, width);
  add_low_rank(run, up, x, halves, up.outputs, memory);
  run.scale(halves, width, up.outputs, scale);
  run.activate(f, halves, y, width);
}

}  // namespace headrace
