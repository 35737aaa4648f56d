// The kernels in use as operations on bf16 rows.
#pragma once

#include "isa/dispatch.h"
#include "model/decoder_layer.h"

namespace headrace {

struct AdaptedRows;
struct Operations;

// Products with a matrix that the rows' adapters change (model/adapters.h), each sum and product rounded: y [T, outputs]; rows of y
// `stride` apart; y in fp32, to which the rounded change is added; of a gated matrix f of that, y [T, width].
void multiply_adapted(const Operations &run, const Matrix &m, const bf16 *x, bf16 *y, const bf16 *residual, float scale);
void multiply_adapted_apart(const Operations &run, const Matrix &m, const bf16 *x, bf16 *y, int64_t stride);
void multiply_adapted_wide(const Operations &run, const Matrix &m, const bf16 *x, float *y);
void multiply_adapted_gated(const Operations &run, const Matrix &up, Activation f, const bf16 *x, bf16 *y, int64_t width,
                            float scale);

struct Operations {
  static constexpr int BF16 = 0, FP32 = 1;

  const Kernels &kernels;
  int64_t rows;
  int threads;
  const AdaptedRows *adapted = nullptr;  // of these rows, if some have an adapter

  bool adapts(const Matrix &m) const { return adapted && m.adapters; }

  static Gate gate_of(Activation f) {
    if (f == Activation::swiglu_oai_mul) return Gate::swiglu_oai;
    if (f == Activation::swiglu_clamped_mul) return Gate::swiglu_clamped;
    return f == Activation::gelu_tanh_mul ? Gate::gelu_tanh : Gate::silu;
  }

  // residual may be y.
  void multiply(const Matrix &m, const bf16 *x, bf16 *y, const bf16 *residual = nullptr, float scale = 1.0f) const {
    if (adapts(m)) return multiply_adapted(*this, m, x, y, residual, scale);
    multiply(m, x, y, {.residual = residual, .scale = scale}, false);
  }

  // Of a gated matrix, whose gates pass through f, `scale` of them.
  void multiply_gated(const Matrix &m, Activation f, const bf16 *x, bf16 *y, float scale = 1.0f) const {
    multiply(m, x, y, {.gated = true, .gate = gate_of(f), .scale = scale}, false);
  }

  // y in fp32, and its tops; without tops what the rows' adapters add to it too.
  void multiply_wide(const Matrix &m, const bf16 *x, float *y, float *tops) const {
    if (!tops && adapts(m)) return multiply_adapted_wide(*this, m, x, y);
    multiply(m, x, y, {nullptr, false, tops}, true);
  }

  // f of the products with `up`: y [T, width]. inner [T, outputs of up] is used where f is no part of the product; alphas: see
  // `activate`; scale: of gates alone.
  void multiply_activated(const Matrix &up, Activation f, const bf16 *x, bf16 *inner, bf16 *y, int64_t width,
                          const float *alphas = nullptr, float scale = 1.0f) const {
    if (up.gated && adapts(up)) return multiply_adapted_gated(*this, up, f, x, y, width, scale);
    if (up.gated) return multiply_gated(up, f, x, y, scale);
    multiply(up, x, inner);
    this->scale(inner, width, up.outputs, scale);
    activate(f, inner, y, width, alphas);
  }

  // y [T, width] times the sigmoid of gates, whose rows lie `stride` apart.
  void let_through(const bf16 *gates, int64_t stride, bf16 *y, int64_t width) const {
    kernels.sigmoid_mul[BF16]({gates, y, rows, width, threads, y, stride});
  }

  // Rows begin[e] .. begin[e + 1] - 1 by matrix e; gates pass through f.
  void multiply_groups(const std::vector<Matrix> &matrices, const std::vector<int64_t> &begin, Activation f, const bf16 *x,
                       bf16 *y) const {
    const Matrix &m = matrices.front();
    const Epilogue epilogue = {.gated = m.gated, .gate = gate_of(f)};
    headrace::multiply_groups(kernels, matrices, begin, {BF16, x, rows, m.inputs, y, false, threads, epilogue});
  }

  // Rows of y lie `stride` apart.
  void multiply_apart(const Matrix &m, const bf16 *x, bf16 *y, int64_t stride) const {
    if (adapts(m)) return multiply_adapted_apart(*this, m, x, y, stride);
    headrace::multiply(kernels, m, {BF16, x, rows, m.inputs, y, false, threads, {}, stride});
  }

  void multiply(const Matrix &m, const bf16 *x, void *y, const Epilogue &epilogue, bool wide) const {
    headrace::multiply(kernels, m, {BF16, x, rows, m.inputs, y, wide, threads, epilogue});
  }

  void norm(const Scale &s, float eps, const bf16 *x, bf16 *y, int64_t width) const {
    const auto &op = s.rms ? kernels.rms_norm : kernels.layer_norm;
    op[BF16]({x, s.weight, s.bias, y, rows, width, 1, width, eps, threads, s.offset});
  }

  void norm_heads(const bf16 *weight, float eps, float offset, bf16 *x, int64_t stride, int64_t heads, int64_t dim) const {
    kernels.rms_norm[BF16]({x, weight, nullptr, x, rows, stride, heads, dim, eps, threads, offset});
  }

  void rotate(const float *cos_sin, int64_t turn_stride, int64_t rotary, bf16 *x, int64_t stride, int64_t heads,
              int64_t dim) const {
    kernels.rotary[BF16]({x, x, cos_sin, rows, stride, stride, heads, dim, rotary, turn_stride, threads});
  }

  void add(bf16 *x, const bf16 *y, int64_t width, float scale = 1.0f) const {
    kernels.add[BF16]({x, y, x, rows * width, threads, scale});
  }

  // x [T, width] *= scale, T being bf16 or float; rows lie `stride` apart.
  template <typename T> void scale(T *x, int64_t width, int64_t stride, float scale) const {
    if (scale == 1.0f) return;
    kernels.times[sizeof(T) == sizeof(bf16) ? BF16 : FP32]({x, nullptr, x, rows, width, stride, 0, stride, scale, threads});
  }

  // y [T, width] *= x, whose rows lie `stride` apart.
  void times(const bf16 *x, int64_t stride, bf16 *y, int64_t width) const {
    kernels.times[BF16]({y, x, y, rows, width, width, stride, width, 1.0f, threads});
  }

  // alphas: of xielu, which alone reads them.
  void activate(Activation f, const bf16 *x, bf16 *y, int64_t width, const float *alphas = nullptr) const {
    const Unary a = {x, y, rows, width, threads, alphas};
    switch (f) {
#define HEADRACE_CASE(name) \
  case Activation::name: return kernels.name[BF16](a);
      HEADRACE_ACTIVATIONS(HEADRACE_CASE)
#undef HEADRACE_CASE
    }
  }
};

}  // namespace headrace
