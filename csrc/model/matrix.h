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

  int64_t bytes_out() const { return wide || type == 1 ? 4 : 2; }
};

inline const void *moved(const void *p, int64_t bytes) { return p ? static_cast<const char *>(p) + bytes : nullptr; }

inline void multiply(const Kernels &kernels, const Matrix &m, const Rows &r, const void *bias) {
  switch (m.form) {
    case Form::plain:
    case Form::pairs: {
      if (m.form == Form::pairs) check_pairs(kernels);
      const auto linear = m.form == Form::pairs ? kernels.linear_pairs : kernels.linear_plain[r.type];
      return linear(
          {r.x, m.weight, bias, r.y, r.rows, r.x_stride, m.inputs, m.outputs, r.wide, r.threads, r.epilogue, r.y_stride});
    }
    default:
      return kernels.linear_quant[r.type]({r.x, m.weight, m.scales, bias, r.y, r.rows, r.x_stride, m.inputs, m.outputs, m.form,
                                           r.wide, r.threads, r.epilogue, m.scaling, m.order, r.y_stride});
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

}  // namespace headrace
