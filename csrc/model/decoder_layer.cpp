#include "model/decoder_layer.h"

#include <algorithm>
#include <cstring>

#include "model/adapters.h"
#include "model/experts.h"
#include "model/latent.h"
#include "model/operations.h"

namespace headrace {
namespace {

constexpr int64_t TILE = 1024;  // rows that go through a layer together: bounds the scratch memory

// f(first row, rows) for each tile.
template <typename F> void tiles(int64_t rows, F f) {
  for (int64_t first = 0; first < rows; first += TILE) f(first, rows - first < TILE ? rows - first : TILE);
}

bool has_experts(const DecoderLayer &block) { return !block.experts.up.empty(); }

// Whether rows meet experts in place of a dense MLP.
bool routed(const DecoderLayer &block) { return has_experts(block) && !block.beside_mlp; }

// What the MLP holds before its activation, if that is not part of the product.
int64_t inner_width(const DecoderLayer &block) { return block.up.gated ? 0 : block.up.outputs; }

constexpr int64_t LINE = 64 / sizeof(bf16);

int64_t whole_lines(int64_t elements) { return (elements + LINE - 1) / LINE * LINE; }

// Elements of what the MLP of a tile takes: rows before and after its activation, or what experts take, from a cache line on.
int64_t mlp_size(const DecoderLayer &block, int64_t rows) {
  const int64_t met = has_experts(block) ? experts_scratch(block.experts, rows) / sizeof(bf16) + LINE : 0;
  return routed(block) ? met : std::max(met, rows * (inner_width(block) + block.down.inputs));
}

int64_t inputs_size(const DecoderLayer &block, int64_t rows) { return block.inputs ? rows * block.inputs->gate.outputs : 0; }

// Elements of the rows of the hidden size that a tile takes.
int64_t hidden_size(const DecoderLayer &block, int64_t rows) { return rows * (block.beside_mlp ? 3 : 2) * block.qkv.inputs; }

int64_t latent_size(const DecoderLayer &block, int64_t rows) {
  return block.latent ? latent_scratch(*block.latent, block.heads, rows) / sizeof(bf16) + LINE : 0;
}

// f(matrix) for each that adapters may change.
template <typename F> void adaptable(const DecoderLayer &block, F f) {
  for (const Matrix *m : {&block.qkv, &block.out, &block.up, &block.down}) f(*m);
  if (block.inputs)
    for (const Matrix *m : {&block.inputs->gate, &block.inputs->out}) f(*m);
  if (block.beside)
    for (const Matrix *m : {&block.beside->mixed, &block.beside->out}) f(*m);
  for (const Matrix &m : block.experts.shared) f(m);
  if (const Matrix *gates = block.gates()) f(*gates);
  if (!block.latent) return;
  f(block.latent->queries);
  if (block.latent->query_in) f(*block.latent->query_in);
}

// Elements of scratch memory that a tile takes, but for its adapters.
int64_t own_size(const DecoderLayer &block, int64_t rows) {
  const int64_t behind = std::max(mlp_size(block, rows), inputs_size(block, rows));
  return hidden_size(block, rows) + std::max(behind, latent_size(block, rows));
}

int64_t adapters_size(const DecoderLayer &block, int64_t rows) {
  int64_t bytes = 0;
  adaptable(block, [&](const Matrix &m) { bytes = std::max(bytes, low_rank_scratch(m, rows)); });
  return bytes ? bytes / sizeof(bf16) + LINE : 0;
}

void *next_line(bf16 *memory) { return reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64); }

// Which rows of a tile have an adapter that may change the layer; nothing if none does.
std::optional<AdaptedRows> adapted_rows(const DecoderLayer &block, const int64_t *numbers, int64_t rows, bf16 *scratch) {
  const int64_t adapters = numbers ? block.adapters() : 0;
  if (adapters == 0) return std::nullopt;
  const AdaptedRows found(numbers, rows, adapters, next_line(scratch + own_size(block, rows)));
  return found.size() ? std::optional<AdaptedRows>(found) : std::nullopt;
}

// Scratch of a tile: rows of the hidden size, c of experts beside an MLP alone, and what the MLP takes, or before it what latents
// take, or behind it what inputs take.
struct Buffers {
  bf16 *a, *b, *c, *inner, *active;

  Buffers(const DecoderLayer &block, bf16 *memory, int64_t rows)
      : a(memory), b(a + rows * block.qkv.inputs), c(b + rows * block.qkv.inputs), inner(a + hidden_size(block, rows)),
        active(inner + rows * inner_width(block)) {}

  void *behind() const { return next_line(inner); }
};

// MLP(x) up to its activation, into buffers.active. Not of experts.
void activate_mlp(const DecoderLayer &block, const Operations &run, const bf16 *x, const Buffers &buffers) {
  const float scale = block.beside ? block.beside->times.up : 1.0f;
  run.multiply_activated(block.up, block.activation, x, buffers.inner, buffers.active, block.down.inputs, block.alphas, scale);
}

// y += scale * MLP(x); y may be x.
void add_mlp(const DecoderLayer &block, const Operations &run, const bf16 *x, bf16 *y, const Buffers &buffers,
             float scale = 1.0f) {
  if (routed(block)) return add_experts(block.experts, block.activation, run, x, y, scale, buffers.behind());
  activate_mlp(block, run, x, buffers);
  run.multiply(block.down, buffers.active, y, y, scale);
}

// y = MLP(x).
void run_mlp(const DecoderLayer &block, const Operations &run, const bf16 *x, bf16 *y, const Buffers &buffers) {
  if (routed(block)) return run_experts(block.experts, block.activation, run, x, y, buffers.behind());
  activate_mlp(block, run, x, buffers);
  run.multiply(block.down, buffers.active, y);
}

// x += scale * norm(y), y being overwritten.
void add_normed(const DecoderLayer &block, const Operations &run, const Scale &norm, bf16 *y, bf16 *x) {
  run.norm(norm, block.out_eps, y, y, block.qkv.inputs);
  run.add(x, y, block.qkv.inputs, block.residual_scale);
}

// y = norm(y) + norm(what the experts of x make), y being what the MLP beside them has made.
void add_beside(const DecoderLayer &block, const Operations &run, const bf16 *x, bf16 *y, const Buffers &buffers) {
  const BesideMlp &own = *block.beside_mlp;
  const int64_t hidden = block.qkv.inputs;
  run.norm(own.dense_out_norm, block.out_eps, y, y, hidden);
  run.norm(own.router_norm, block.eps, x, buffers.b, hidden);
  run.scale(buffers.b, hidden, hidden, own.factor);
  run.norm(own.experts_norm, block.eps, x, buffers.c, hidden);
  run_experts(block.experts, block.activation, run, buffers.c, buffers.c, buffers.behind(), buffers.b);
  run.norm(own.experts_out_norm, block.out_eps, buffers.c, buffers.c, hidden);
  run.add(y, buffers.c, hidden);
}

// x += what the layer makes of its inputs, gated by x.
void add_inputs(const DecoderLayer &block, const Operations &run, InputRows from, bf16 *x, const Buffers &buffers) {
  const LayerInputs &own = *block.inputs;
  const int64_t hidden = block.qkv.inputs, width = own.gate.outputs;
  run.multiply(own.gate, x, buffers.inner);
  run.activate(Activation::gelu_tanh, buffers.inner, buffers.inner, width);
  run.times(from.at, from.stride, buffers.inner, width);
  run.multiply(own.out, buffers.inner, buffers.a);
  run.norm(own.norm, block.eps, buffers.a, buffers.a, hidden);
  run.add(x, buffers.a, hidden);
}

// x += what is made of attention and of the recurrent layer beside it.
void add_both(const DecoderLayer &block, const Operations &run, const bf16 *attended, const bf16 *recurred, bf16 *x,
              const Buffers &buffers) {
  const Beside &beside = *block.beside;
  const int64_t hidden = block.qkv.inputs;
  run.multiply(beside.out, recurred, buffers.b);
  run.scale(buffers.b, hidden, hidden, beside.times.recurrent_out);
  run.multiply(block.out, attended, buffers.a, buffers.b, beside.times.out);
  run.add(x, buffers.a, hidden);
}

// recurred: of a recurrent layer beside attention. own: the layer's inputs, if it has some.
void finish(const DecoderLayer &block, const Operations &run, bf16 *x, const bf16 *attended, const bf16 *recurred,
            InputRows own, const Buffers &buffers) {
  const int64_t hidden = block.qkv.inputs;
  bf16 *a = buffers.a, *b = buffers.b;
  switch (block.order) {
    case Order::pre:
      if (block.beside) add_both(block, run, attended, recurred, x, buffers);
      else run.multiply(block.out, attended, x, x, block.residual_scale);
      if (!block.up.outputs) return;
      run.norm(block.mlp_norm, block.eps, x, b, hidden);
      return add_mlp(block, run, b, x, buffers, block.beside ? block.beside->times.down : block.residual_scale);
    case Order::sandwich:
    case Order::after:
      run.multiply(block.out, attended, a);
      add_normed(block, run, block.attention_out_norm, a, x);
      if (block.order == Order::sandwich) run.norm(block.mlp_norm, block.eps, x, b, hidden);
      run_mlp(block, run, block.order == Order::sandwich ? b : x, a, buffers);
      if (block.beside_mlp) add_beside(block, run, x, a, buffers);
      add_normed(block, run, block.mlp_out_norm, a, x);
      if (block.inputs) add_inputs(block, run, own, x, buffers);
      return run.scale(x, hidden, hidden, block.scale);
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

// Rows from `first` on of what a recurrent layer takes, and of its gates.
void mix(const DecoderLayer &block, const Operations &run, const bf16 *x, int64_t first, int64_t rows, bf16 *heads_out) {
  const Matrix &mixed = block.mixed();
  bf16 *to = heads_out + block.mixed_at(rows) + first * mixed.outputs;
  run.multiply(mixed, x, to);
  if (block.beside) run.scale(to, block.beside->out.inputs, mixed.outputs, block.beside->times.z);
  const Matrix *made = block.gates();
  if (!made) return;
  float *gates = reinterpret_cast<float *>(heads_out + block.gates_at(rows)) + first * made->outputs;
  run.multiply_wide(*made, x, gates, nullptr);
  if (block.beside) run.scale(gates, made->outputs, made->outputs, block.beside->times.gates);
}

// Values of projected rows, where they are keys or normed.
void make_values(const DecoderLayer &block, const Operations &run, bf16 *q) {
  const int64_t width = block.mixed_width(), kv = block.kv_heads * block.dim;
  bf16 *k = q + block.heads * block.dim, *v = k + kv;
  if (block.keys_as_values)
    for (int64_t t = 0; t < run.rows; ++t) memcpy(v + t * width, k + t * width, kv * sizeof(bf16));
  if (block.v_norm) run.norm_heads(block.v_norm, block.eps, 0.0f, v, width, block.kv_heads, block.dim);
}

// Queries and keys, normed and rotated as the layer has it. turns: rows of cos_sin, `rotary` apart, or null.
void norm_and_turn(const DecoderLayer &block, const Operations &run, bf16 *q, const float *turns, int64_t rotary) {
  const int64_t width = block.mixed_width(), dim = block.dim;
  bf16 *k = q + block.heads * dim;
  const auto norm = [&](const bf16 *weight, bf16 *x, int64_t count) {
    const int64_t size = block.norm_whole ? count * dim : dim;
    run.norm_heads(weight, block.eps, block.attention_norm.offset, x, width, block.norm_whole ? 1 : count, size);
  };
  const auto norms = [&] {
    if (block.q_norm) norm(block.q_norm, q, block.heads);
    if (block.k_norm) norm(block.k_norm, k, block.kv_heads);
  };
  const auto turn = [&](int64_t begin, bf16 *x, int64_t count) {
    if (turns && count) run.rotate(turns + begin, rotary, block.turned, x, width, count, dim);
  };
  if (!block.turn_before_norm) norms();
  if (block.query_first == block.turn_first) {
    turn(block.turn_first, q, block.heads + block.kv_heads);
  } else {
    turn(block.query_first, q, block.heads);
    turn(block.turn_first, k, block.kv_heads);
  }
  if (block.turn_before_norm) norms();
}

}  // namespace

int64_t DecoderLayer::scratch(int64_t rows) const {
  const int64_t most = rows < TILE ? rows : TILE;
  return own_size(*this, most) + adapters_size(*this, most);
}

int64_t DecoderLayer::adapters() const {
  size_t most = 0;
  adaptable(*this, [&](const Matrix &m) { most = m.adapters ? std::max(most, m.adapters->up.size()) : most; });
  return static_cast<int64_t>(most);
}

int64_t DecoderLayer::mixed_at(int64_t rows) const { return beside ? whole_lines(rows * qkv.outputs) : 0; }

int64_t DecoderLayer::gates_at(int64_t rows) const { return mixed_at(rows) + whole_lines(rows * mixed().outputs); }

int64_t DecoderLayer::recurred_at(int64_t rows) const { return beside ? whole_lines(rows * out.inputs) : 0; }

int64_t DecoderLayer::attended_size(int64_t rows) const {
  return recurred_at(rows) + rows * (beside ? beside->out.inputs : attended_width());
}

int64_t DecoderLayer::mixed_size(int64_t rows) const {
  if (!gates()) return rows * mixed_width();
  return gates_at(rows) + rows * gates()->outputs * static_cast<int64_t>(sizeof(float) / sizeof(bf16));
}

void DecoderLayer::before(const bf16 *x, const float *cos_sin, int64_t rotary, bf16 *heads_out, bf16 *scratch, int64_t rows,
                          int threads, const int64_t *adapted) const {
  const int64_t hidden = qkv.inputs, width = mixed_width();
  tiles(rows, [&](int64_t first, int64_t count) {
    const auto changed = adapted_rows(*this, adapted ? adapted + first : nullptr, count, scratch);
    const Operations run = {kernels(), count, threads, changed ? &*changed : nullptr};
    const bf16 *from = x + first * hidden;
    if (order != Order::post && order != Order::after) {
      run.norm(attention_norm, eps, from, scratch, hidden);
      from = scratch;
    }
    if (recurrent()) mix(*this, run, from, first, rows, heads_out);
    if (!attends()) return;
    bf16 *q = heads_out + first * width;
    const float *turns = cos_sin && turned ? cos_sin + first * rotary : nullptr;
    if (latent) {
      const float *own = turns ? turns + turn_first : nullptr;
      return project_latents(*this, run, from, own, rotary, q, Buffers(*this, scratch, count).behind());
    }
    if (keys_as_values) run.multiply_apart(qkv, from, q, width);
    else run.multiply(qkv, from, q);
    make_values(*this, run, q);
    norm_and_turn(*this, run, q, turns, rotary);
  });
}

void DecoderLayer::after(bf16 *x, bf16 *attended, bf16 *scratch, int64_t rows, int threads, AttentionGates gates,
                         const int64_t *adapted, InputRows own) const {
  tiles(rows, [&](int64_t first, int64_t count) {
    const auto changed = adapted_rows(*this, adapted ? adapted + first : nullptr, count, scratch);
    const Operations run = {kernels(), count, threads, changed ? &*changed : nullptr};
    const Buffers buffers(*this, scratch, count);
    bf16 *mine = attended + first * attended_width();
    if (latent) mine = values_of_latents(*this, run, mine, buffers.behind());
    if (gates.at) run.let_through(gates.at + first * gates.stride, gates.stride, mine, out.inputs);
    const bf16 *recurred = beside ? attended + recurred_at(rows) + first * beside->out.inputs : nullptr;
    const InputRows inputs = {own.at ? own.at + first * own.stride : nullptr, own.stride};
    finish(*this, run, x + first * qkv.inputs, mine, recurred, inputs, buffers);
  });
}

}  // namespace headrace
