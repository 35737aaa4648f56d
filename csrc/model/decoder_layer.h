// A decoder layer but for its attention: all that comes before attend, and all that comes after, each in one call.
// In bf16. It composes the kernels in use and has no arithmetic of its own: the bits are those of single operations.
//
// T: rows; H: hidden size; Hq, Hkv: query and KV heads; D: head size; I: MLP width.
#pragma once

#include <vector>

#include "kernels.h"
#include "model/borrowed.h"

namespace headrace {

typedef uint16_t bf16;

enum class Order { pre, post, parallel };  // models.spec.Block
#define HEADRACE_NAME(name) name,
enum class Activation { HEADRACE_ACTIVATIONS(HEADRACE_NAME) };
#undef HEADRACE_NAME

// A weight [outputs, inputs] that rows are multiplied by, its scales if it has any, and its bias [outputs] or null. gated: see
// Epilogue in kernels.h.
struct Matrix {
  Form form;
  Borrowed<const void> weight, scales;
  Borrowed<const bf16> bias;
  int64_t inputs, outputs;
  bool gated;
};

// The vectors of a norm, each may be null.
struct Scale {
  bool rms;
  Borrowed<const bf16> weight, bias;
};

// The MLP of a layer with experts, each of its own `up` and `down`, of which a row meets `chosen`. No experts: a dense MLP.
struct Experts {
  Matrix router;
  std::vector<Matrix> up, down;
  int64_t chosen;
  bool normalised;  // as in Route
};

struct DecoderLayer {
  Order order;
  Activation activation;
  int64_t heads, kv_heads, dim;
  float eps;
  Matrix qkv, out, up, down;  // with experts, up and down are the first one's
  Experts experts;
  Scale attention_norm, mlp_norm;
  Borrowed<const bf16> q_norm, k_norm;  // null where queries and keys are not normed
  bool norm_whole;                      // they are normed over all heads together, not [D] each

  // Elements of scratch memory that either call needs for `rows` rows.
  int64_t scratch(int64_t rows) const;

  // x [T, H] -> qkv [T, Hq + 2 Hkv, D] = (q, k, v); cos_sin [T, rotary] fp32 or null: nothing is rotated.
  void before(const bf16 *x, const float *cos_sin, int64_t rotary, bf16 *qkv, bf16 *scratch, int64_t rows, int threads) const;

  // attended [T, Hq, D]; x [T, H] becomes the layer's output.
  void after(bf16 *x, const bf16 *attended, bf16 *scratch, int64_t rows, int threads) const;
};

}  // namespace headrace
