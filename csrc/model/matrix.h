// A weight in the form in which it lies, and the one place that knows which kernel multiplies by it.
#pragma once

#include <vector>

#include "common/checks.h"
#include "kernels.h"
#include "model/borrowed.h"

namespace headrace {

typedef uint16_t bf16;

// A weight [outputs, inputs] that rows are multiplied by, its scales if it has any, and its bias [outputs] or null. gated: see
// Epilogue in kernels.h. order: as in LinearQuant. parts: the weights whose outputs, one behind the other, are this one's; then
// it has none of its own but a bias, and no epilogue.
struct Matrix {
  Form form;
  Borrowed<const void> weight, scales;
  Borrowed<const bf16> bias;
  int64_t inputs, outputs;
  bool gated;
  Scaling scaling = {};
  Borrowed<const int32_t> order = {};
  std::vector<Matrix> parts = {};
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
  Groups groups = {};  // of matrices like the one that is given, see groups_of

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
    own.y_stride = m.outputs;
    multiply(kernels, part, own, moved(m.bias, first * (r.type == 1 ? 4 : 2)));
    first += part.outputs;
  }
}

// Whether one product takes either's weight for some of its rows.
inline bool alike(const Matrix &a, const Matrix &b) {
  const Scaling &s = a.scaling, &t = b.scaling;
  return a.form == b.form && a.inputs == b.inputs && a.outputs == b.outputs && a.gated == b.gated && a.order == b.order &&
         s.number == t.number && s.offset == t.offset && s.subs == t.subs && s.block == t.block && s.group == t.group &&
         s.run == t.run && a.parts.empty() && b.parts.empty();
}

// Throws if one product does not take all of them.
inline void check_alike(const std::vector<Matrix> &matrices) {
  for (const Matrix &m : matrices)
    if (!alike(m, matrices.front())) refuse("matrices of one product differ in their form or shape");
}

// Rows begin[e] .. begin[e + 1] - 1 by matrix e, without those that have no rows.
inline std::vector<Group> groups_of(const std::vector<Matrix> &matrices, const std::vector<int64_t> &begin) {
  std::vector<Group> groups;
  for (size_t e = 0; e < matrices.size(); ++e)
    if (begin[e] < begin[e + 1])
      groups.push_back({matrices[e].weight, matrices[e].scales, matrices[e].bias, begin[e], begin[e + 1]});
  return groups;
}

}  // namespace headrace
