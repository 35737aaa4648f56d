#include "model/decoder_layer.h"

#include <algorithm>

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

// What the MLP holds before its activation, if that is not part of the product.
int64_t inner_width(const DecoderLayer &block) { return block.up.gated ? 0 : block.up.outputs; }

constexpr int64_t LINE = 64 / sizeof(bf16);

// Elements of what the MLP of a tile takes: rows before and after its activation, or what experts take, from a cache line on.
int64_t mlp_size(const DecoderLayer &block, int64_t rows) {
  if (has_experts(block)) return experts_scratch(block.experts, rows) / sizeof(bf16) + LINE;
  return rows * (inner_width(block) + block.down.inputs);
}

int64_t latent_size(const DecoderLayer &block, int64_t rows) {
  return block.latent ? latent_scratch(*block.latent, block.heads, rows) / sizeof(bf16) + LINE : 0;
}

// f(matrix) for each that adapters may change.
template <typename F> void adaptable(const DecoderLayer &block, F f) {
  for (const Matrix *m : {&block.qkv, &block.out, &block.up, &block.down}) f(*m);
  for (const Matrix &m : block.experts.shared) f(m);
  if (const Matrix *gates = block.gates()) f(*gates);
  if (!block.latent) return;
  f(block.latent->queries);
  if (block.latent->query_in) f(*block.latent->query_in);
}

// Elements of scratch memory that a tile takes, but for its adapters.
int64_t own_size(const DecoderLayer &block, int64_t rows) {
  return rows * 2 * block.qkv.inputs + std::max(mlp_size(block, rows), latent_size(block, rows));
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

// Scratch of a tile: two rows of the hidden size, and what the MLP takes, or before it what latents take.
struct Buffers {
  bf16 *a, *b, *inner, *active;

  Buffers(const DecoderLayer &block, bf16 *memory, int64_t rows)
      : a(memory), b(a + rows * block.qkv.inputs), inner(b + rows * block.qkv.inputs),
        active(inner + rows * inner_width(block)) {}

  void *behind() const { return next_line(inner); }
};

// MLP(x) up to its activation, into buffers.active. Not of experts.
void activate_mlp(const DecoderLayer &block, const Operations &run, const bf16 *x, const Buffers &buffers) {
  run.multiply_activated(block.up, block.activation, x, buffers.inner, buffers.active, block.down.inputs, block.alphas);
}

// y += scale * MLP(x); y may be x.
void add_mlp(const DecoderLayer &block, const Operations &run, const bf16 *x, bf16 *y, const Buffers &buffers,
             float scale = 1.0f) {
  if (has_experts(block)) return add_experts(block.experts, block.activation, run, x, y, scale, buffers.behind());
  activate_mlp(block, run, x, buffers);
  run.multiply(block.down, buffers.active, y, y, scale);
}

// y = MLP(x).
void run_mlp(const DecoderLayer &block, const Operations &run, const bf16 *x, bf16 *y, const Buffers &buffers) {
  if (has_experts(block)) return run_experts(block.experts, block.activation, run, x, y, buffers.behind());
  activate_mlp(block, run, x, buffers);
  run.multiply(block.down, buffers.active, y);
}

// x += scale * norm(y), y being overwritten.
void add_normed(const DecoderLayer &block, const Operations &run, const Scale &norm, bf16 *y, bf16 *x) {
  run.norm(norm, block.out_eps, y, y, block.qkv.inputs);
  run.add(x, y, block.qkv.inputs, block.residual_scale);
}

void finish(const DecoderLayer &block, const Operations &run, bf16 *x, const bf16 *attended, const Buffers &buffers) {
  const int64_t hidden = block.qkv.inputs;
  bf16 *a = buffers.a, *b = buffers.b;
  switch (block.order) {
    case Order::pre:
      run.multiply(block.out, attended, x, x, block.residual_scale);
      if (!block.up.outputs) return;
      run.norm(block.mlp_norm, block.eps, x, b, hidden);
      return add_mlp(block, run, b, x, buffers, block.residual_scale);
    case Order::sandwich:
    case Order::after:
      run.multiply(block.out, attended, a);
      add_normed(block, run, block.attention_out_norm, a, x);
      if (block.order == Order::sandwich) run.norm(block.mlp_norm, block.eps, x, b, hidden);
      run_mlp(block, run, block.order == Order::sandwich ? b : x, a, buffers);
      return add_normed(block, run, block.mlp_out_norm, a, x);
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

int64_t DecoderLayer::scratch(int64_t rows) const {
  const int64_t most = rows < TILE ? rows : TILE;
  return own_size(*this, most) + adapters_size(*this, most);
}

int64_t DecoderLayer::adapters() const {
  size_t most = 0;
  adaptable(*this, [&](const Matrix &m) { most = m.adapters ? std::max(most, m.adapters->up.size()) : most; });
  return static_cast<int64_t>(most);
}

int64_t DecoderLayer::gates_at(int64_t rows) const { return (rows * qkv.outputs + LINE - 1) / LINE * LINE; }

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
    bf16 *q = heads_out + first * width, *k = q + heads * dim;
    if (order != Order::post && order != Order::after) {
      run.norm(attention_norm, eps, from, scratch, hidden);
      from = scratch;
    }
    if (latent) {
      const float *turns = cos_sin && turned ? cos_sin + first * rotary + turn_first : nullptr;
      return project_latents(*this, run, from, turns, rotary, q, Buffers(*this, scratch, count).behind());
    }
    run.multiply(qkv, from, q);
    if (const Matrix *made = gates()) {
      float *to = reinterpret_cast<float *>(heads_out + gates_at(rows));
      return run.multiply_wide(*made, from, to + first * made->outputs, nullptr);
    }
    if (recurrent()) return;
    const auto norm = [&](const bf16 *weight, bf16 *x, int64_t count) {
      const int64_t size = norm_whole ? count * dim : dim;
      run.norm_heads(weight, eps, attention_norm.offset, x, width, norm_whole ? 1 : count, size);
    };
    const auto norms = [&] {
      if (q_norm) norm(q_norm, q, heads);
      if (k_norm) norm(k_norm, k, kv_heads);
    };
    const auto turn = [&](int64_t begin, bf16 *x, int64_t count) {
      if (cos_sin && turned && count) run.rotate(cos_sin + first * rotary + begin, rotary, turned, x, width, count, dim);
    };
    if (!turn_before_norm) norms();
    if (query_first == turn_first) {
      turn(turn_first, q, heads + kv_heads);
    } else {
      turn(query_first, q, heads);
      turn(turn_first, k, kv_heads);
    }
    if (turn_before_norm) norms();
  });
}

void DecoderLayer::after(bf16 *x, bf16 *attended, bf16 *scratch, int64_t rows, int threads, AttentionGates gates,
                         const int64_t *adapted) const {
  tiles(rows, [&](int64_t first, int64_t count) {
    const auto changed = adapted_rows(*this, adapted ? adapted + first : nullptr, count, scratch);
    const Operations run = {kernels(), count, threads, changed ? &*changed : nullptr};
    const Buffers buffers(*this, scratch, count);
    bf16 *mine = attended + first * attended_width();
    if (latent) mine = values_of_latents(*this, run, mine, buffers.behind());
    if (gates.at) run.let_through(gates.at + first * gates.stride, gates.stride, mine, out.inputs);
    finish(*this, run, x + first * qkv.inputs, mine, buffers);
  });
}

}  // namespace headrace
