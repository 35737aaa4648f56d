// The kernels in use as operations on bf16 rows.
#pragma once

#include "common/checks.h"
#include "isa/dispatch.h"
#include "model/decoder_layer.h"

namespace headrace {

struct Operations {
  static constexpr int BF16 = 0;

  const Kernels &kernels;
  int64_t rows;
  int threads;

  // residual may be y.
  void multiply(const Matrix &m, const bf16 *x, bf16 *y, const bf16 *residual = nullptr) const {
    multiply(m, x, y, {residual, m.gated}, false);
  }

  // y in fp32, and its tops.
  void multiply_wide(const Matrix &m, const bf16 *x, float *y, float *tops) const {
    multiply(m, x, y, {nullptr, false, tops}, true);
  }

  // Rows in groups with weights like m.
  void multiply_groups(const Matrix &m, const Groups &groups, const bf16 *x, bf16 *y) const {
    multiply(m, x, y, {nullptr, m.gated}, false, groups);
  }

  // The one place that knows in which forms weights come.
  void multiply(const Matrix &m, const bf16 *x, void *y, const Epilogue &epilogue, bool wide, const Groups &groups = {}) const {
    switch (m.form) {
      case Form::plain:
      case Form::pairs: {
        const auto linear = m.form == Form::pairs ? kernels.linear_pairs : kernels.linear_plain[BF16];
        return linear({x, m.weight, m.bias, y, rows, m.inputs, m.inputs, m.outputs, wide, threads, epilogue, groups});
      }
      default:
        return kernels.linear_quant[BF16](
            {x, m.weight, m.scales, m.bias, y, rows, m.inputs, m.inputs, m.outputs, m.form, wide, threads, epilogue, groups});
    }
  }

  void norm(const Scale &s, float eps, const bf16 *x, bf16 *y, int64_t width) const {
    const auto &op = s.rms ? kernels.rms_norm : kernels.layer_norm;
    op[BF16]({x, s.weight, s.bias, y, rows, width, 1, width, eps, threads});
  }

  void norm_heads(const bf16 *weight, float eps, bf16 *x, int64_t stride, int64_t heads, int64_t dim) const {
    kernels.rms_norm[BF16]({x, weight, nullptr, x, rows, stride, heads, dim, eps, threads});
  }

  void rotate(const float *cos_sin, int64_t rotary, bf16 *x, int64_t stride, int64_t heads, int64_t dim) const {
    kernels.rotary[BF16]({x, x, cos_sin, rows, stride, stride, heads, dim, rotary, threads});
  }

  void add(bf16 *x, const bf16 *y, int64_t width) const { kernels.add[BF16]({x, y, x, rows * width, threads}); }

  void activate(Activation f, const bf16 *x, bf16 *y, int64_t width) const {
    const Unary a = {x, y, rows, width, threads};
    switch (f) {
#define HEADRACE_CASE(name) \
  case Activation::name: return kernels.name[BF16](a);
      HEADRACE_ACTIVATIONS(HEADRACE_CASE)
#undef HEADRACE_CASE
    }
  }
};

}  // namespace headrace
