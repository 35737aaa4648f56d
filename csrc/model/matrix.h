// A weight in the form in which it lies, and the one place that knows which kernel multiplies by it.
#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <vector>

#include "common/checks.h"
#include "kernels.h"
#include "model/borrowed.h"

namespace headrace {

typedef uint16_t bf16;

struct LowRank;

// A weight [outputs, inputs] that rows are multiplied by, its scales if it has any, and its bias [outputs] or null. gated: see
// Epilogue in kernels.h. order: as in LinearQuant. parts: the weights whose outputs, one behind the other, are this one's; then
// it has none of its own but a bias, and no epilogue. adapters: what rows that have one are multiplied by as well, or none; whoever
// multiplies by the matrix alone does not look at them.
struct Matrix {
  Form form;
  Borrowed<const void> weight, scales;
  Borrowed<const bf16> bias;
  int64_t inputs, outputs;
  bool gated;
  Scaling scaling = {};
  Borrowed<const int32_t> order = {};
  std::vector<Matrix> parts = {};
  std::shared_ptr<const LowRank> adapters = {};
};

// To the product of a matrix with x adapter e adds up[e] [outputs, rank] times (down[e] [rank, inputs] times x); of one that adds
// nothing both have no outputs. turned: the bias of a gated matrix, in the order in which its outputs lie.
struct LowRank {
  int64_t rank;
  std::vector<Matrix> down, up;
  std::vector<bf16> turned;
};

// Rows that are multiplied, and where to. type: of x, of the matrix's bias and of a narrow y; 0 is bf16, 1 is fp32. y_stride: as
// out_stride of Linear.
struct Rows {
  int type;
  const void *x;
  int64_t rows, x_stride;
  void *y;
  bool wide;
  int threads;
  Epilogue epilogue = {};
  int64_t y_stride = 0;
  Groups groups = {};  // of matrices like the one that is given, see multiply_groups

  int64_t bytes_out() const { return wide || type == 1 ? 4 : 2; }
};

inline const void *moved(const void *p, int64_t bytes) { return p ? static_cast<const char *>(p) + bytes : nullptr; }

inline void multiply(const Kernels &kernels, const Matrix &m, const Rows &r, const void *bias) {
  switch (m.form) {
    case Form::plain:
    case Form::pairs: {
      if (m.form == Form::pairs) check_pairs(kernels);
      const auto linear = m.form == Form::pairs ? kernels.linear_pairs : kernels.linear_plain[r.type];
      return linear({r.x, m.weight, bias, r.y, r.rows, r.x_stride, m.inputs, m.outputs, r.wide, r.threads, r.epilogue,
                     r.y_stride, r.groups});
    }
    default:
      return kernels.linear_quant[r.type]({r.x, m.weight, m.scales, bias, r.y, r.rows, r.x_stride, m.inputs, m.outputs, m.form,
                                           r.wide, r.threads, r.epilogue, m.scaling, m.order, r.y_stride, r.groups});
  }
}

// r.y = r.x times the matrix, plus its bias.
inline void multiply(const Kernels &kernels, const Matrix &m, const Rows &r) {
  if (m.parts.empty()) return multiply(kernels, m, r, m.bias);
  int64_t first = 0;
  for (const Matrix &part : m.parts) {
    Rows own = r;
    own.y = static_cast<char *>(r.y) + first * r.bytes_out();
    own.y_stride = r.y_stride ? r.y_stride : m.outputs;
    multiply(kernels, part, own, moved(m.bias, first * (r.type == 1 ? 4 : 2)));
    first += part.outputs;
  }
}

// out [rows, inputs] = scale * the matrix's rows [index[t]], in a type as in Rows: see PackedRows. Throws for an index that is not
// in it, and for a matrix that has no rows of its own.
inline void look_up(const Kernels &kernels, const Matrix &m, int type, const int64_t *index, int64_t rows, void *out,
                    float scale, int threads) {
  if (m.gated || !m.parts.empty() || m.form == Form::w8a8) refuse("rows of a table cannot be read from such a matrix");
  check_index("token", index, rows, m.outputs);
  kernels.packed_rows[type]({m.weight, m.scales, index, out, rows, m.inputs, m.form, m.scaling, m.order, scale, threads});
}

// Whether one product takes either's weight for some of its rows.
inline bool alike(const Matrix &a, const Matrix &b) {
  const Scaling &s = a.scaling, &t = b.scaling;
  return a.form == b.form && a.inputs == b.inputs && a.outputs == b.outputs && a.gated == b.gated && !a.order == !b.order &&
         s.number == t.number && s.offset == t.offset && s.subs == t.subs && s.block == t.block && s.group == t.group &&
         s.run == t.run;
}

// Throws unless all of them make as much of as many inputs.
inline void check_shapes(const std::vector<Matrix> &matrices) {
  const Matrix &first = matrices.front();
  for (const Matrix &m : matrices)
    if (m.inputs != first.inputs || m.outputs != first.outputs || m.gated != first.gated)
      refuse("matrices of one product differ in their shape");
}

// A matrix, or a part of one, that some rows of a product meet. column: where its outputs begin among all.
struct Met {
  const Matrix *matrix;
  const void *bias;
  int64_t column;
  int64_t first, last;

  Group group() const { return {matrix->weight, matrix->scales, bias, matrix->order, first, last}; }
};

// Those of rows begin[e] .. begin[e + 1] - 1 by matrix e. bias_bytes: of an element.
inline std::vector<Met> met_by(const std::vector<Matrix> &matrices, const std::vector<int64_t> &begin, int64_t bias_bytes) {
  std::vector<Met> met;
  for (size_t e = 0; e < matrices.size(); ++e) {
    const Matrix &m = matrices[e];
    if (begin[e] == begin[e + 1] || m.outputs == 0) continue;
    if (m.parts.empty()) met.push_back({&m, m.bias, 0, begin[e], begin[e + 1]});
    int64_t column = 0;
    for (const Matrix &part : m.parts) {
      met.push_back({&part, moved(m.bias, column * bias_bytes), column, begin[e], begin[e + 1]});
      column += part.outputs;
    }
  }
  return met;
}

// r.y = rows begin[e] .. begin[e + 1] - 1 of r.x times matrix e, plus its bias: one product for all matrices, or parts of them,
// that are alike. Matrices of no rows are not read; rows of matrices that have no outputs are left alone.
inline void multiply_groups(const Kernels &kernels, const std::vector<Matrix> &matrices, const std::vector<int64_t> &begin,
                            const Rows &r) {
  std::vector<Met> left = met_by(matrices, begin, r.type == 1 ? 4 : 2);
  while (!left.empty()) {
    const Met first = left.front();
    const auto rest = std::stable_partition(left.begin(), left.end(), [&](const Met &each) {
      return each.column == first.column && alike(*each.matrix, *first.matrix);
    });
    std::vector<Group> groups;
    std::transform(left.begin(), rest, std::back_inserter(groups), [](const Met &each) { return each.group(); });
    Rows own = r;
    own.y = static_cast<char *>(r.y) + first.column * r.bytes_out();
    own.y_stride = first.matrix->gated ? 0 : r.y_stride ? r.y_stride : matrices.front().outputs;
    own.groups = {groups.data(), static_cast<int64_t>(groups.size())};
    multiply(kernels, *first.matrix, own, nullptr);
    left.erase(left.begin(), rest);
  }
}

}  // namespace headrace
