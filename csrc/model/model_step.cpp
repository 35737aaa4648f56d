#include "model/model_step.h"

#include <cstring>
#include <string>

#include "model/operations.h"

namespace headrace {

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

int64_t ModelStep::scratch() const {
  constexpr int64_t GAPS = 6 * 32;
  const DecoderLayer &first = *blocks.front();
  const int64_t rows = step.rows(), each = 2 * rotary + first.qkv.inputs + first.qkv.outputs + first.out.inputs;
  return rows * each + first.scratch(rows) + 2 * tops_size(rows, ends.head.outputs) + GAPS;
}

void ModelStep::run(const int64_t *tokens, bf16 *scratch, float *logits, float *greatest, int64_t *place, int threads) const {
  const DecoderLayer &first = *blocks.front();
  const int64_t rows = step.rows(), hidden = first.qkv.inputs;
  Stretches memory{scratch};
  float *cos_sin = reinterpret_cast<float *>(memory.take(2 * rows * rotary));
  LayerBuffers r = {nullptr, turns ? cos_sin : nullptr, rotary, nullptr, nullptr, nullptr, rows, threads};
  r.x = memory.take(rows * hidden);
  r.qkv = memory.take(rows * first.qkv.outputs);
  r.attended = memory.take(rows * first.out.inputs);
  r.scratch = memory.take(first.scratch(rows));
  look_up("token", ends.embed, ends.vocabulary, hidden, tokens, rows, r.x);
  if (turns) look_up("position", turns, turn_rows, rotary, step.positions(), rows, cos_sin);
  run_layers(blocks.data(), layers.data(), layers.size(), step, r);
  if (ends.head.form == Form::pairs) check_pairs(kernels());
  const Operations run = {kernels(), rows, threads};
  float *tops = reinterpret_cast<float *>(memory.take(2 * tops_size(rows, ends.head.outputs)));
  run.norm(ends.norm, ends.eps, r.x, r.x, hidden);
  run.multiply_wide(ends.head, r.x, logits, tops);
  kernels().greatest({logits, greatest, place, rows, ends.head.outputs, threads, tops});
}

}  // namespace headrace
