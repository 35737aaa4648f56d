// A decoder layer but for its attention: all that comes before attend, and all that comes after, each in one call; or
// several layers with the attention of an engine step.
// In bf16. It composes the kernels in use and has no arithmetic of its own: the bits are those of single operations.
//
// T: rows; H: hidden size; Hq, Hkv: query and KV heads; D: head size; I: MLP width.
#pragma once

#include "isa/dispatch.h"
#include "model/step.h"

namespace headrace {

typedef uint16_t bf16;

enum class Order { pre, post, parallel };  // models.spec.Block
enum class Activation { silu_mul, gelu, gelu_tanh, relu };
enum class Form { plain, pairs, int8, int4 };  // how a weight lies: see linear_plain.cpp, linear.cpp, linear_quant.cpp

// A weight [outputs, inputs] that rows are multiplied by, its scales if it has any, and its bias [outputs] or null. gated: see
// Ending in kernels.h.
struct Matrix {
  Form form;
  const void *weight, *scales;
  const bf16 *bias;
  int64_t inputs, outputs;
  bool gated;
};

// The vectors of a norm, each may be null.
struct Scale {
  bool rms;
  const bf16 *weight, *bias;
};

struct Block {
  Order order;
  Activation activation;
  int64_t heads, kv_heads, dim;
  float eps;
  Matrix qkv, out, up, down;
  Scale attention_norm, mlp_norm;
  const bf16 *q_norm, *k_norm;  // [D], null where queries and keys are not normed

  // Elements of scratch memory that either call needs for `rows` rows.
  int64_t scratch(int64_t rows) const;

  // x [T, H] -> qkv [T, Hq + 2 Hkv, D] = (q, k, v); cos_sin [T, rotary] fp32 or null: nothing is rotated.
  void before(const bf16 *x, const float *cos_sin, int64_t rotary, bf16 *qkv, bf16 *scratch, int64_t rows, int threads) const;

  // attended [T, Hq, D]; x [T, H] becomes the layer's output.
  void after(bf16 *x, const bf16 *attended, bf16 *scratch, int64_t rows, int threads) const;
};

// Memory that layers share: x [T, H], which becomes the last one's output, qkv and attended as above, cos_sin and rotary too.
struct Rows {
  bf16 *x;
  const float *cos_sin;
  int64_t rotary;
  bf16 *qkv, *attended, *scratch;
  int64_t rows;
  int threads;
};

// `count` layers, one after another.
void run_layers(const Block *const *blocks, const Step::Layer *layers, size_t count, const Step &step, const Rows &r);

// What a model has before its layers and after them.
struct Ends {
  const bf16 *embed;  // [V, H]
  int64_t vocabulary;
  Scale norm;
  float eps;
  Matrix head;
};

// A step from its tokens to its logits, as often as wanted.
struct Whole {
  const Ends &ends;
  std::vector<const Block *> blocks;
  std::vector<Step::Layer> layers;  // one for each block
  const Step &step;
  const float *turns;  // rotations of each position [turn_rows, rotary], or null
  int64_t turn_rows, rotary;

  // Elements of scratch memory that `run` needs.
  int64_t scratch() const;

  // tokens [T] -> logits fp32 [T, V], the greatest of each row [T] and where it is first, as Greatest says. Throws for
  // tokens and positions that are in no table.
  void run(const int64_t *tokens, bf16 *scratch, float *logits, float *greatest, int64_t *place, int threads) const;
};

}  // namespace headrace
