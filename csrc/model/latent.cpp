#include "model/latent.h"

#include <algorithm>
#include <cstring>

#include "common/arena.h"
#include "common/shares.h"

namespace headrace {

using HEADRACE_NS::room;
using HEADRACE_NS::Scratch;

namespace {

constexpr int64_t MANY_ELEMENTS = 16384;  // copied: below, waking the other threads costs more than it saves

// Where numbers of heads lie: those of row t and head h from at + t * row + h * head on.
template <typename T> struct Heads {
  T *at;
  int64_t row, head;

  T *of(int64_t t, int64_t h) const { return at + t * row + h * head; }
};

// The first `size` numbers of each row and head.
void copy(const Operations &run, int64_t heads, int64_t size, Heads<const bf16> from, Heads<bf16> to) {
  const int64_t all = run.rows * heads;
  HEADRACE_NS::share_each(all, all * size > MANY_ELEMENTS ? run.threads : 1, [&](int64_t i) {
    memcpy(to.of(i / heads, i % heads), from.of(i / heads, i % heads), size * sizeof(bf16));
  });
}

int64_t by_head_bytes(const std::vector<Matrix> &matrices, int64_t rows) {
  const int64_t all = static_cast<int64_t>(matrices.size()) * rows;
  return room<bf16>(all * matrices.front().inputs) + room<bf16>(all * matrices.front().outputs);
}

// Each head times its own matrix: one product of all, in which a head's rows lie together.
void multiply_by_head(const std::vector<Matrix> &matrices, const Operations &run, Heads<const bf16> from, Heads<bf16> to,
                      Scratch memory) {
  const int64_t heads = static_cast<int64_t>(matrices.size()), rows = run.rows;
  const int64_t inputs = matrices.front().inputs, outputs = matrices.front().outputs;
  bf16 *x = memory.take<bf16>(heads * rows * inputs), *y = memory.take<bf16>(heads * rows * outputs);
  copy(run, heads, inputs, from, {x, inputs, rows * inputs});
  std::vector<int64_t> begin(heads + 1);
  for (int64_t h = 0; h <= heads; ++h) begin[h] = h * rows;
  multiply_groups(run.kernels, matrices, begin, {Operations::BF16, x, heads * rows, inputs, y, false, run.threads});
  copy(run, heads, outputs, {y, outputs, rows * outputs}, to);
}

int64_t narrow_width(const Latent &latent) { return latent.query_in ? latent.query_in->outputs : 0; }

}  // namespace

int64_t latent_scratch(const Latent &latent, int64_t heads, int64_t rows) {
  if (heads == 0) return 0;
  const int64_t before =
      room<bf16>(rows * narrow_width(latent)) + room<bf16>(rows * latent.queries.outputs) + by_head_bytes(latent.keys, rows);
  const int64_t after = room<bf16>(rows * heads * latent.values.front().outputs) + by_head_bytes(latent.values, rows);
  return std::max(before, after);
}

void project_latents(const DecoderLayer &block, const Operations &run, const bf16 *x, const float *cos_sin, int64_t turn_stride,
                     bf16 *heads, void *scratch) {
  const Latent &latent = *block.latent;
  const int64_t width = block.mixed_width(), rank = latent.values.front().inputs, rotated = block.dim - rank;
  const auto turn = [&](bf16 *x, int64_t stride, int64_t count, int64_t dim) {
    if (cos_sin) run.rotate(cos_sin, turn_stride, block.turned, x, stride, count, dim);
  };
  bf16 *key = heads + block.heads * block.dim;
  run.multiply_apart(block.qkv, x, key, width);
  run.norm_heads(latent.latent_norm, latent.eps, 0.0f, key + rotated, width, 1, rank);
  turn(key, width, 1, block.dim);
  if (block.heads == 0) return;
  Scratch memory(scratch);
  const int64_t narrow = narrow_width(latent), each = latent.queries.outputs / block.heads;
  bf16 *normed = memory.take<bf16>(run.rows * narrow), *queries = memory.take<bf16>(run.rows * latent.queries.outputs);
  if (latent.query_in) {
    run.multiply(*latent.query_in, x, normed);
    run.norm_heads(latent.query_norm, latent.eps, 0.0f, normed, narrow, 1, narrow);
  }
  run.multiply(latent.queries, latent.query_in ? normed : x, queries);
  turn(queries, latent.queries.outputs, block.heads, each);
  copy(run, block.heads, rotated, {queries, latent.queries.outputs, each}, {heads, width, block.dim});
  multiply_by_head(latent.keys, run, {queries + rotated, latent.queries.outputs, each}, {heads + rotated, width, block.dim},
                   memory);
}

bf16 *values_of_latents(const DecoderLayer &block, const Operations &run, const bf16 *attended, void *scratch) {
  const std::vector<Matrix> &values = block.latent->values;
  const int64_t value = values.front().outputs, rotated = block.dim - values.front().inputs;
  Scratch memory(scratch);
  bf16 *made = memory.take<bf16>(run.rows * block.heads * value);
  multiply_by_head(values, run, {attended + rotated, block.heads * block.dim, block.dim}, {made, block.heads * value, value},
                   memory);
  return made;
}

}  // namespace headrace
