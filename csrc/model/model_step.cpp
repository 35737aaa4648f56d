#include "model/model_step.h"

#include <algorithm>
#include <cstring>

#include "common/arena.h"
#include "model/operations.h"

namespace headrace {

using HEADRACE_NS::room;

void run_layers(const Blocks &blocks, const std::vector<AttentionStep::Layer> &layers, const Recurrence *recurrence,
                const LayerBuffers &r) {
  size_t attentions = 0, recurrences = 0;
  InputRows inputs = r.inputs;
  for (const DecoderLayer *each : blocks) {
    const DecoderLayer &block = *each;
    const int64_t stride = block.mixed_width();
    block.before(r.x, r.cos_sin, r.rotary, r.qkv, r.scratch, r.rows, r.threads, r.adapted);
    if (block.recurrent()) {
      if (!recurrence) refuse("a recurrent layer needs the states of its rows");
      recurrence->run(recurrences++, block, r.qkv, r.attended + block.recurred_at(r.rows), r.rows, r.threads);
    }
    if (!block.attends()) {
      block.after(r.x, r.attended, r.scratch, r.rows, r.threads, {}, r.adapted);
      continue;
    }
    const int64_t kv = block.kv_heads * block.dim;
    bf16 *k = r.qkv + block.heads * block.dim, *v = block.latent ? k : k + kv;
    layers.at(attentions++).run({r.qkv, stride}, {k, stride}, {v, stride}, r.attended);
    const AttentionGates gates = block.gated ? AttentionGates{v + kv, stride} : AttentionGates{};
    block.after(r.x, r.attended, r.scratch, r.rows, r.threads, gates, r.adapted, inputs);
    if (block.inputs) inputs.at += block.inputs->gate.outputs;
  }
}

LayerSizes::LayerSizes(const Blocks &blocks, int64_t rows) {
  for (const DecoderLayer *block : blocks) {
    scratch = std::max(scratch, block->scratch(rows));
    qkv = std::max(qkv, block->mixed_size(rows));
    attended = std::max(attended, block->attended_size(rows));
  }
}

namespace {

// rows [index[t]] of a table [count, width] -> out [T, width]. Throws for an index that is not in it.
template <typename T>
void look_up(const char *what, const T *table, int64_t count, int64_t width, const int64_t *index, int64_t rows, T *out) {
  check_index(what, index, rows, count);
  for (int64_t t = 0; t < rows; ++t) memcpy(out + t * width, table + index[t] * width, width * sizeof(T));
}

// scale * the rows of tokens [T] in a table [vocabulary, width], or in its packed form -> x. Throws for a token that is not in it.
void embed(const bf16 *table, int64_t vocabulary, const std::optional<Matrix> &packed, const int64_t *tokens, int64_t rows,
           int64_t width, bf16 *x, float scale, int threads) {
  if (packed) return look_up(kernels(), *packed, Operations::BF16, tokens, rows, x, scale, threads);
  if (scale == 1.0f) return look_up<bf16>("token", table, vocabulary, width, tokens, rows, x);
  check_index("token", tokens, rows, vocabulary);
  kernels().embed[Operations::BF16]({table, tokens, x, rows, width, scale});
}

// The inputs [T, L P] of all layers of tokens [T], which enter the first one as x [T, H]. own [T, L P]: for use.
void make_inputs(const InputsTable &t, const Operations &run, const int64_t *tokens, const bf16 *x, bf16 *own, bf16 *inputs) {
  const int64_t all = t.projection.outputs;
  embed(t.table, t.vocabulary, t.packed, tokens, run.rows, all, own, t.table_scale, run.threads);
  run.multiply(t.projection, x, inputs);
  run.scale(inputs, all, all, t.projected_scale);
  run.norm_heads(t.norm, t.eps, 0.0f, inputs, all, all / t.width, t.width);
  run.add(inputs, own, all);
  run.scale(inputs, all, all, t.sum_scale);
}

}  // namespace

int64_t ModelStep::scratch() const {
  const DecoderLayer &first = *blocks.front();
  const int64_t rows = step.rows();
  const LayerSizes sizes(blocks, rows);
  const int64_t inputs = ends.inputs ? 2 * room<bf16>(rows * ends.inputs->projection.outputs) : 0;
  const int64_t bytes = inputs + room<float>(rows * rotary) + room<bf16>(rows * first.qkv.inputs) + room<bf16>(sizes.qkv) +
                        room<bf16>(sizes.attended) + room<bf16>(sizes.scratch) +
                        room<float>(tops_size(rows, ends.head.outputs));
  return bytes / sizeof(bf16);
}

void ModelStep::run(const int64_t *tokens, const Recurrence *recurrence, bf16 *scratch, float *logits, float *greatest,
                    int64_t *place, int threads) const {
  const DecoderLayer &first = *blocks.front();
  const LayerSizes sizes(blocks, step.rows());
  const int64_t rows = step.rows(), hidden = first.qkv.inputs;
  HEADRACE_NS::Scratch memory(scratch);
  float *cos_sin = memory.take<float>(rows * rotary);
  LayerBuffers r = {nullptr, turns ? cos_sin : nullptr, rotary, nullptr, nullptr, nullptr, rows, threads, adapted};
  r.x = memory.take<bf16>(rows * hidden);
  r.qkv = memory.take<bf16>(sizes.qkv);
  r.attended = memory.take<bf16>(sizes.attended);
  r.scratch = memory.take<bf16>(sizes.scratch);
  float *tops = memory.take<float>(tops_size(rows, ends.head.outputs));
  embed(ends.embed, ends.vocabulary, ends.packed, tokens, rows, hidden, r.x, ends.embed_scale, threads);
  if (turns) look_up<float>("position", turns, turn_rows, rotary, step.positions(), rows, cos_sin);
  const Operations run = {kernels(), rows, threads};
  if (ends.inputs) {
    const int64_t all = ends.inputs->projection.outputs;
    bf16 *own = memory.take<bf16>(rows * all), *made = memory.take<bf16>(rows * all);
    make_inputs(*ends.inputs, run, tokens, r.x, own, made);
    r.inputs = {made, all};
  }
  run_layers(blocks, layers, recurrence, r);
  run.norm(ends.norm, ends.eps, r.x, r.x, hidden);
  const bool capped = ends.logit_scale != 1.0f || ends.logit_cap != 0.0f;
  run.multiply_wide(ends.head, r.x, logits, capped ? nullptr : tops);
  if (capped) kernels().soft_cap(logits, rows * ends.head.outputs, ends.logit_scale, ends.logit_cap, threads);
  kernels().greatest({logits, greatest, place, rows, ends.head.outputs, threads, capped ? nullptr : tops});
}

}  // namespace headrace
