// What products with packed weights have in common: how work is shared out, and how sums become results.
#pragma once

#include "common/arena.h"
#include "common/shares.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

constexpr int64_t COLUMNS = 64;  // outputs in a packed block
static_assert(COLUMNS == TOPS);

HEADRACE_INLINE void take_weight(Linear &a, const Group &g) { a.w = g.weight, a.bias = g.bias; }
HEADRACE_INLINE void take_weight(LinearQuant &a, const Group &g) {
  a.codes = g.weight, a.scales = g.scales, a.bias = g.bias, a.order = g.order;
}

// The product with the weight of one of its groups.
template <typename Any> Any with_weight(const Any &a, const Group &group) {
  Any own = a;
  own.groups = {};
  take_weight(own, group);
  return own;
}

// Rows that are left out, in what a product has of each row beside x.
HEADRACE_INLINE void skip_rows(Linear &, int64_t) {}

// The same as a product of the group's rows alone.
template <typename T, typename Any> Any alone(const Any &a, const Group &group) {
  Any own = with_weight(a, group);
  const int64_t to = group.first * (a.epilogue.gated ? a.outputs / 2 : a.out_stride ? a.out_stride : a.outputs);
  own.rows = group.last - group.first;
  own.x = static_cast<const T *>(a.x) + group.first * a.x_stride;
  own.out = static_cast<T *>(a.out) + to;
  if (a.epilogue.residual) own.epilogue.residual = static_cast<const T *>(a.epilogue.residual) + to;
  skip_rows(own, group.first);
  return own;
}

// many(product) for each group of at least `least` rows, as a product of its own; few(product) for the groups between two such.
template <typename T, typename Any, typename F, typename G>
void by_height(const Any &a, int64_t least, F many, G few) {
  const Group *groups = a.groups.each;
  const auto high = [&](int64_t i) { return groups[i].last - groups[i].first >= least; };
  for (int64_t i = 0, begin = 0; i < a.groups.count; begin = i) {
    while (i < a.groups.count && !high(i)) ++i;
    if (i > begin) {
      Any part = a;
      part.groups = {groups + begin, i - begin};
      few(part);
    } else {
      many(alone<T>(a, groups[i++]));
    }
  }
}

// Which rows of a product share a weight: those of each group, or all.
template <typename Any> class Spans {
 public:
  // A task takes `most` rows.
  Spans(const Any &a, int64_t most) : a(a), most(most) {
    for (int64_t i = 0; i < count(); ++i) all += tasks(span(i));
  }

  int64_t size() const { return all; }

  // f(the product with that weight, first row, last row) of a task.
  template <typename F> void run(int64_t task, F f) const {
    int64_t i = 0;
    for (; task >= tasks(span(i)); ++i) task -= tasks(span(i));
    const Group rows = span(i);
    const int64_t first = rows.first + task * most, last = first + most < rows.last ? first + most : rows.last;
    a.groups.each ? f(with_weight(a, rows), first, last) : f(a, first, last);
  }

 private:
  int64_t count() const { return a.groups.each ? a.groups.count : 1; }
  Group span(int64_t i) const {
    return a.groups.each ? a.groups.each[i] : Group{nullptr, nullptr, nullptr, nullptr, 0, a.rows};
  }
  int64_t tasks(const Group &g) const { return (g.last - g.first + most - 1) / most; }

  const Any &a;
  int64_t most, all = 0;
};

// f(the product with its weight, row) for each row of a product, or of its groups.
template <typename Any, typename F> void each_row(const Any &a, F f) {
  constexpr int64_t MOST = 16;  // rows of a task
  const Spans spans(a, MOST);
  share_out(spans.size(), a.threads, [&](int64_t task) {
    spans.run(task, [&](const Any &own, int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) f(own, row);
    });
  });
}

// n <= W outputs from `column` on, as their sums and the bias make them; their weights lie at `place` among all.
template <typename T> HEADRACE_INLINE vf output(const Linear &a, const float *sums, int64_t column, int64_t, int64_t n) {
  const T *bias = static_cast<const T *>(a.bias);
  const vf y = load(sums);
  return bias ? y + load_up_to(bias + column, n) : y;
}

// Of weights in this format: see codes.h. x_sums: of the inputs of each row by runs, [rows][inputs / run], where scales have
// offsets.
template <typename Codes> struct LinearOf : LinearQuant {
  const float *x_sums = nullptr;
};

template <typename Codes> void skip_rows(LinearOf<Codes> &a, int64_t rows) {
  if (a.x_sums) a.x_sums += rows * (a.inputs / a.scaling.run);
}

template <typename T, typename Codes>
HEADRACE_INLINE vf output(const LinearOf<Codes> &a, const float *sums, int64_t column, int64_t place, int64_t n) {
  const T *bias = static_cast<const T *>(a.bias);
  const vf scale = Codes::GROUPED ? splat(1.0f) : load(static_cast<const float *>(a.scales) + place);
  return madd(load(sums), scale, bias ? load_part(bias + column, n) : vf{});
}

// scale * y as a residual is added to, each step rounded.
template <typename T> HEADRACE_INLINE vf added(const T *type, vf y, float scale) {
  y = round_as(type, y);
  return scale == 1.0f ? y : round_as(type, y * splat(scale));
}

// `count` outputs of each row, COUNT of them if that is known beforehand.
template <typename T, typename Out, int64_t COUNT, typename Any>
void write_rows(const Any &a, int64_t column, int64_t first, int64_t last, const float *sums, int64_t count) {
  if (COUNT) count = COUNT;
  const T *residual = static_cast<const T *>(a.epilogue.residual);
  const int64_t stride = a.out_stride ? a.out_stride : a.outputs;
  for (int64_t row = first; row < last; ++row, sums += COLUMNS) {
    const int64_t at = row * stride + column;
    Out *out = static_cast<Out *>(a.out) + at;
    for (int64_t c = 0; c < count; c += W) {
      const int64_t n = count - c < W ? count - c : W;
      vf y = output<T>(a, sums + c, column + c, column + c, n);
      if (residual) y = load_up_to(residual + at + c, n) + added(residual, y, a.epilogue.scale);
      store_up_to(out + c, y, n);
    }
  }
}

template <typename T, typename Out, typename Any>
void write_block(const Any &a, int64_t column, int64_t first, int64_t last, const float *sums) {
  const int64_t count = a.outputs - column;
  count < COLUMNS ? write_rows<T, Out, 0>(a, column, first, last, sums, count)
                  : write_rows<T, Out, COLUMNS>(a, column, first, last, sums, COLUMNS);
}

// The greatest of `count` numbers, at most 64; NaN if one of them is.
HEADRACE_INLINE float top_of(const float *x, int64_t count) {
  vf most = splat(-__builtin_inff());
  vi broken = {};
  int64_t c = 0;
  for (; c + W <= count; c += W) {
    const vf y = load(x + c);
    most = max(y, most);
    broken |= y != y;
  }
  bool nan = any(broken);
  float top = greatest(most);
  for (; c < count; ++c) {
    nan |= x[c] != x[c];
    top = x[c] > top ? x[c] : top;
  }
  return nan ? __builtin_nanf("") : top;
}

// The tops (see Epilogue) of what write_block has written, which lies in L1 still.
template <typename Any> void write_tops(const Any &a, int64_t column, int64_t first, int64_t last) {
  const int64_t left = a.outputs - column, count = left < COLUMNS ? left : COLUMNS;
  float *tops = a.epilogue.tops + column / COLUMNS * tops_width(a.rows);
  for (int64_t row = first; row < last; ++row)
    tops[row] = top_of(static_cast<const float *>(a.out) + row * a.outputs + column, count);
}

// One block of outputs from its sums [last - first, 64].
template <typename T, typename Any>
void write(const Any &a, int64_t column, int64_t first, int64_t last, const float *sums) {
  if (!a.wide) return write_block<T, T>(a, column, first, last, sums);
  write_block<T, float>(a, column, first, last, sums);
  if (a.epilogue.tops) write_tops(a, column, first, last);
}

HEADRACE_INLINE vf let_through(Gate f, vf gate, vf other) {
  switch (f) {
    case Gate::silu: return sigmoid_times(gate, gate) * other;
    case Gate::gelu_tanh: return gelu_tanh_of(gate) * other;
    case Gate::swiglu_oai: return swiglu_oai_of(gate, other);
    default: return swiglu_clamped_of(gate, other);
  }
}

// The same of a block of gates and the block that they let through.
template <typename T, typename Any>
void write_gated(const Any &a, int64_t column, int64_t first, int64_t last, const float *gates, const float *others) {
  const int64_t width = a.outputs / 2;
  for (int64_t row = first; row < last; ++row, gates += COLUMNS, others += COLUMNS) {
    T *out = static_cast<T *>(a.out) + row * width + column;
    for (int64_t c = 0; c < COLUMNS; c += W) {
      const int64_t at = column + c, place = 2 * column + c;
      const vf gate = added(out, output<T>(a, gates + c, at, place, W), a.epilogue.scale);
      const vf other = round_as(out, output<T>(a, others + c, width + at, place + COLUMNS, W));
      store(out + c, let_through(a.epilogue.gate, gate, other));
    }
  }
}

// multiply(product, block of outputs, first row, last row, sums, scratch) for each block and each `most` rows of a weight, and
// what becomes of the sums. product: that of the weight of these rows. scratch: so many bytes for multiply's own use.
template <typename T, typename Any, typename F> void each_block(const Any &a, int64_t most, int64_t scratch, F multiply) {
  const int64_t all = (a.outputs + COLUMNS - 1) / COLUMNS, blocks = a.epilogue.gated ? all / 2 : all;
  const int64_t size = most * COLUMNS;
  const Spans spans(a, most);
  share_out(blocks * spans.size(), a.threads, [&](int64_t i) {
    const int64_t block = i % blocks, column = block * COLUMNS;
    Scratch memory = arena((a.epilogue.gated ? 2 : 1) * room<float>(size) + scratch);
    float *sums = memory.take<float>(size);
    spans.run(i / blocks, [&](const Any &own, int64_t first, int64_t last) {
      if (a.epilogue.gated) {
        float *others = memory.take<float>(size);
        multiply(own, 2 * block, first, last, sums, memory);
        multiply(own, 2 * block + 1, first, last, others, memory);
        return write_gated<T>(own, column, first, last, sums, others);
      }
      multiply(own, block, first, last, sums, memory);
      write<T>(own, column, first, last, sums);
    });
  });
}

}  // namespace headrace::HEADRACE_NS
