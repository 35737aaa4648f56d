#include "model/model_step.h"

#include <algorithm>
#include <cstring>

#include "common/arena.h"
#include "model/operations.h"

namespace headrace {

using HEADRACE_NS::room;

void run_layers(const DecoderLayer *const *blocks, const AttentionStep::Layer *layers, size_t count, const AttentionStep &step,
                const LayerBuffers &r) {
  for (size_t i = 0; i < count; ++i) {
    const DecoderLayer &block = *blocks[i];
    const int64_t stride = block.qkv.outputs;
    bf16 *k = r.qkv + block.heads * block.dim, *v = k + block.kv_heads * block.dim;
    block.before(r.x, r.cos_sin, r.rotary, r.qkv, r.scratch, r.rows, r.threads);
    step.run(layers[i], {r.qkv, stride}, {k, stride}, {v, stride}, r.attended);
    block.after(r.x, r.attended, r.scratch, r.rows, r.threads);
  }
}

namespace {

// What any of the layers needs.
int64_t most_scratch(const std::vector<const DecoderLayer *> &blocks, int64_t rows) {
  int64_t most = 0;
  for (const DecoderLayer *block : blocks) most = std::max(most, block->scratch(rows));
  return most;
}

void check_index(const char *what, const int64_t *index, int64_t rows, int64_t count) {
  for (int64_t t = 0; t < rows; ++t)
    if (index[t] < 0 || index[t] >= count) refuse(what, " of row ", t, " is ", index[t], ", of ", count);
}

// rows [index[t]] of a table [count, width] -> out [T, width]. Throws for an index that is not in it.
template <typename T>
void look_up(const char *what, const T *table, int64_t count, int64_t width, const int64_t *index, int64_t rows, T *out) {
  check_index(what, index, rows, count);
  for (int64_t t = 0; t < rows; ++t) memcpy(out + t * width, table + index[t] * width, width * sizeof(T));
}

// The embeddings x [T, H] of tokens [T]. Throws for a token that is not in the table.
void embed(const EmbeddingAndHead &ends, const int64_t *tokens, int64_t rows, int64_t hidden, bf16 *x) {
  if (ends.embed_scale == 1.0f) return look_up<bf16>("token", ends.embed, ends.vocabulary, hidden, tokens, rows, x);
  check_index("token", tokens, rows, ends.vocabulary);
  kernels().embed[Operations::BF16]({ends.embed, tokens, x, rows, hidden, ends.embed_scale});
}

}  // namespace

int64_t ModelStep::scratch() const {
  const DecoderLayer &first = *blocks.front();
  const int64_t rows = step.rows();
  const int64_t bytes = room<float>(rows * rotary) + room<bf16>(rows * first.qkv.inputs) +
                        room<bf16>(rows * first.qkv.outputs) + room<bf16>(rows * first.out.inputs) +
                        room<bf16>(most_scratch(blocks, rows)) + room<float>(tops_size(rows, ends.head.outputs));
  return bytes / sizeof(bf16);
}

void ModelStep::run(const int64_t *tokens, bf16 *scratch, float *logits, float *greatest, int64_t *place, int threads) const {
  const DecoderLayer &first = *blocks.front();
  const int64_t rows = step.rows(), hidden = first.qkv.inputs;
  HEADRACE_NS::Scratch memory(scratch);
  float *cos_sin = memory.take<float>(rows * rotary);
  LayerBuffers r = {nullptr, turns ? cos_sin : nullptr, rotary, nullptr, nullptr, nullptr, rows, threads};
  r.x = memory.take<bf16>(rows * hidden);
  r.qkv = memory.take<bf16>(rows * first.qkv.outputs);
  r.attended = memory.take<bf16>(rows * first.out.inputs);
  r.scratch = memory.take<bf16>(most_scratch(blocks, rows));
  float *tops = memory.take<float>(tops_size(rows, ends.head.outputs));
  embed(ends, tokens, rows, hidden, r.x);
  if (turns) look_up<float>("position", turns, turn_rows, rotary, step.positions(), rows, cos_sin);
  run_layers(blocks.data(), layers.data(), layers.size(), step, r);
  const Operations run = {kernels(), rows, threads};
  run.norm(ends.norm, ends.eps, r.x, r.x, hidden);
  const bool capped = ends.logit_scale != 1.0f || ends.logit_cap != 0.0f;
  run.multiply_wide(ends.head, r.x, logits, capped ? nullptr : tops);
  if (capped) kernels().soft_cap(logits, rows * ends.head.outputs, ends.logit_scale, ends.logit_cap, threads);
  kernels().greatest({logits, greatest, place, rows, ends.head.outputs, threads, capped ? nullptr : tops});
}

}  // namespace headrace
