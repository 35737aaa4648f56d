#include "model/block.h"

#include <cstring>
#include <string>

#include "common/checks.h"

namespace headrace {
namespace {

constexpr int BF16 = 0;
constexpr int64_t TILE = 1024;  // rows that go through a layer together: bounds the scratch memory

// The kernels in use, over some rows.
struct Pass {
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

  // The one place that knows in which forms weights come.
  void multiply(const Matrix &m, const bf16 *x, void *y, const Ending &ending, bool wide) const {
    switch (m.form) {
      case Form::plain:
      case Form::pairs: {
        const auto linear = m.form == Form::pairs ? kernels.linear_pairs : kernels.linear_plain[BF16];
        return linear({x, m.weight, m.bias, y, rows, m.inputs, m.inputs, m.outputs, wide, threads, ending});
      }
      case Form::int8:
      case Form::int4:
        const int bits = m.form == Form::int8 ? 8 : 4;
        return kernels.linear_quant[BF16](
            {x, m.weight, m.scales, m.bias, y, rows, m.inputs, m.inputs, m.outputs, bits, wide, threads, ending});
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
      case Activation::silu_mul: return kernels.silu_mul[BF16](a);
      case Activation::gelu: return kernels.gelu[BF16](a);
      case Activation::gelu_tanh: return kernels.gelu_tanh[BF16](a);
      case Activation::relu: return kernels.relu[BF16](a);
    }
  }
};

Pass pass(const Block &block, int64_t rows, int threads) {
  for (const Matrix *m : {&block.qkv, &block.out, &block.up, &block.down})
    if (m->form == Form::pairs) check_pairs(kernels());
  return {kernels(), rows, threads};
}

// f(first row, rows) for each tile.
template <typename F> void tiles(int64_t rows, F f) {
  for (int64_t first = 0; first < rows; first += TILE) f(first, rows - first < TILE ? rows - first : TILE);
}

// What the MLP holds before its activation, if that is not part of the product.
int64_t inner_width(const Block &block) { return block.up.gated ? 0 : block.up.outputs; }

// Scratch of a tile: two rows of the hidden size, and the MLP's before and after its activation.
struct Buffers {
  bf16 *a, *b, *inner, *active;

  Buffers(const Block &block, bf16 *memory, int64_t rows)
      : a(memory), b(a + rows * block.qkv.inputs), inner(b + rows * block.qkv.inputs),
        active(inner + rows * inner_width(block)) {}
};

// y += MLP(x); y may be x.
void add_mlp(const Block &block, const Pass &run, const bf16 *x, bf16 *y, const Buffers &buffers) {
  run.multiply(block.up, x, block.up.gated ? buffers.active : buffers.inner);
  if (!block.up.gated) run.activate(block.activation, buffers.inner, buffers.active, block.down.inputs);
  run.multiply(block.down, buffers.active, y, y);
}

void finish(const Block &block, const Pass &run, bf16 *x, const bf16 *attended, const Buffers &buffers) {
  const int64_t hidden = block.qkv.inputs;
  bf16 *a = buffers.a, *b = buffers.b;
  switch (block.order) {
    case Order::pre:
      run.multiply(block.out, attended, x, x);
      run.norm(block.mlp_norm, block.eps, x, b, hidden);
      return add_mlp(block, run, b, x, buffers);
    case Order::post:
      run.multiply(block.out, attended, x, x);
      run.norm(block.attention_norm, block.eps, x, x, hidden);
      add_mlp(block, run, x, x, buffers);
      return run.norm(block.mlp_norm, block.eps, x, x, hidden);
    case Order::parallel:
      run.multiply(block.out, attended, a);
      run.norm(block.mlp_norm, block.eps, x, b, hidden);
      add_mlp(block, run, b, a, buffers);
      return run.add(x, a, hidden);
  }
}

}  // namespace

int64_t Block::scratch(int64_t rows) const {
  return (rows < TILE ? rows : TILE) * (2 * qkv.inputs + inner_width(*this) + down.inputs);
}

void Block::before(const bf16 *x, const float *cos_sin, int64_t rotary, bf16 *heads_out, bf16 *scratch, int64_t rows,
                   int threads) const {
  const int64_t hidden = qkv.inputs, width = qkv.outputs;
  tiles(rows, [&](int64_t first, int64_t count) {
    const Pass run = pass(*this, count, threads);
    const bf16 *from = x + first * hidden;
    bf16 *q = heads_out + first * width, *k = q + heads * dim;
    if (order != Order::post) {
      run.norm(attention_norm, eps, from, scratch, hidden);
      from = scratch;
    }
    run.multiply(qkv, from, q);
    if (q_norm) run.norm_heads(q_norm, eps, q, width, heads, dim);
    if (k_norm) run.norm_heads(k_norm, eps, k, width, kv_heads, dim);
    if (cos_sin) run.rotate(cos_sin + first * rotary, rotary, q, width, heads + kv_heads, dim);
  });
}

void Block::after(bf16 *x, const bf16 *attended, bf16 *scratch, int64_t rows, int threads) const {
  tiles(rows, [&](int64_t first, int64_t count) {
    finish(*this, pass(*this, count, threads), x + first * qkv.inputs, attended + first * out.inputs,
           Buffers(*this, scratch, count));
  });
}

void run_layers(const Block *const *blocks, const Step::Layer *layers, size_t count, const Step &step, const Rows &r) {
  for (size_t i = 0; i < count; ++i) {
    const Block &block = *blocks[i];
    const int64_t stride = block.qkv.outputs;
    bf16 *k = r.qkv + block.heads * block.dim, *v = k + block.kv_heads * block.dim;
    block.before(r.x, r.cos_sin, r.rotary, r.qkv, r.scratch, r.rows, r.threads);
    step.run(layers[i], {r.qkv, stride}, {k, stride}, {v, stride}, r.attended);
    block.after(r.x, r.attended, r.scratch, r.rows, r.threads);
  }
}

namespace {

// Memory handed out in stretches of whole cache lines.
struct Stretches {
  bf16 *left;

  bf16 *take(int64_t elements) {
    bf16 *taken = left;
    left += (elements + 31) / 32 * 32;
    return taken;
  }
};

// rows [index[t]] of a table [count, width] -> out [T, width]. Throws for an index that is not in it.
template <typename T>
void look_up(const char *what, const T *table, int64_t count, int64_t width, const int64_t *index, int64_t rows, T *out) {
  for (int64_t t = 0; t < rows; ++t) {
    if (index[t] < 0 || index[t] >= count)
      throw std::invalid_argument(std::string(what) + " of row " + std::to_string(t) + " is " + std::to_string(index[t]) +
                                  ", of " + std::to_string(count));
    memcpy(out + t * width, table + index[t] * width, width * sizeof(T));
  }
}

}  // namespace

int64_t Whole::scratch() const {
  constexpr int64_t GAPS = 6 * 32;
  const Block &first = *blocks.front();
  const int64_t rows = step.rows(), each = 2 * rotary + first.qkv.inputs + first.qkv.outputs + first.out.inputs;
  return rows * each + first.scratch(rows) + 2 * tops_size(rows, ends.head.outputs) + GAPS;
}

void Whole::run(const int64_t *tokens, bf16 *scratch, float *logits, float *greatest, int64_t *place, int threads) const {
  const Block &first = *blocks.front();
  const int64_t rows = step.rows(), hidden = first.qkv.inputs;
  Stretches memory{scratch};
  float *cos_sin = reinterpret_cast<float *>(memory.take(2 * rows * rotary));
  Rows r = {nullptr, turns ? cos_sin : nullptr, rotary, nullptr, nullptr, nullptr, rows, threads};
  r.x = memory.take(rows * hidden);
  r.qkv = memory.take(rows * first.qkv.outputs);
  r.attended = memory.take(rows * first.out.inputs);
  r.scratch = memory.take(first.scratch(rows));
  look_up("token", ends.embed, ends.vocabulary, hidden, tokens, rows, r.x);
  if (turns) look_up("position", turns, turn_rows, rotary, step.positions(), rows, cos_sin);
  run_layers(blocks.data(), layers.data(), layers.size(), step, r);
  if (ends.head.form == Form::pairs) check_pairs(kernels());
  const Pass run = {kernels(), rows, threads};
  float *tops = reinterpret_cast<float *>(memory.take(2 * tops_size(rows, ends.head.outputs)));
  run.norm(ends.norm, ends.eps, r.x, r.x, hidden);
  run.multiply_wide(ends.head, r.x, logits, tops);
  kernels().greatest({logits, greatest, place, rows, ends.head.outputs, threads, tops});
}

}  // namespace headrace
