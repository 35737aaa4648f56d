// Decoder layers with the attention of an engine step: several of them, or the step from its tokens to its logits.
#pragma once

#include <vector>

#include "model/attention_step.h"
#include "model/decoder_layer.h"
#include "model/recurrence.h"

namespace headrace {

// Memory that layers share: x [T, H], which becomes the last one's output, qkv and attended as in DecoderLayer and with room for
// those of any layer, cos_sin, rotary and adapted too.
struct LayerBuffers {
  bf16 *x;
  const float *cos_sin;
  int64_t rotary;
  bf16 *qkv, *attended, *scratch;
  int64_t rows;
  int threads;
  const int64_t *adapted = nullptr;
  InputRows inputs = {};  // of all layers that have some, one behind the other
};

typedef std::vector<const DecoderLayer *> Blocks;

// One after another; those with attention have their places in `layers` by their order, those without in the recurrence.
void run_layers(const Blocks &blocks, const std::vector<AttentionStep::Layer> &layers, const Recurrence *recurrence,
                const LayerBuffers &r);

// Of `rows` rows what any of the layers needs, in elements: scratch, qkv and attended of LayerBuffers.
struct LayerSizes {
  int64_t scratch = 0, qkv = 0, attended = 0;

  LayerSizes(const Blocks &blocks, int64_t rows);
};

// What makes the inputs of all layers of a token: a row of a table [V, L P], as EmbeddingAndHead has its own, and what enters the
// first layer, projected and normed.
struct InputsTable {
  Borrowed<const bf16> table;
  int64_t vocabulary;
  std::optional<Matrix> packed;
  Matrix projection;
  Borrowed<const bf16> norm;  // [P]
  int64_t width;              // P
  float eps, table_scale, projected_scale, sum_scale;
};

// What a model has before its layers and after them.
struct EmbeddingAndHead {
  Borrowed<const bf16> embed;  // [V, H], or null where the table is `packed`
  int64_t vocabulary;
  Scale norm;
  float eps;
  Matrix head;
  float embed_scale, logit_scale, logit_cap;  // see Embed, and soft_cap; 1, 1 and 0 change nothing
  std::optional<Matrix> packed = {};          // the table, maybe the head itself
  std::optional<InputsTable> inputs = {};
};

// A step from its tokens to its logits, as often as wanted.
struct ModelStep {
  const EmbeddingAndHead &ends;
  Blocks blocks;                             // borrowed, as are `ends` and `step`
  std::vector<AttentionStep::Layer> layers;  // one for each block with attention
  const AttentionStep &step;
  Borrowed<const float> turns;  // rotations of each position [turn_rows, rotary], or null
  int64_t turn_rows, rotary;
  Borrowed<const int64_t> adapted;  // the number of each row's adapter, see DecoderLayer, or null

  // Elements of scratch memory that `run` needs.
  int64_t scratch() const;

  // tokens [T] -> logits fp32 [T, V], the greatest of each row [T] and where it is first, as Greatest says. recurrence: of a model
  // with recurrent layers. Throws for tokens and positions that are in no table.
  void run(const int64_t *tokens, const Recurrence *recurrence, bf16 *scratch, float *logits, float *greatest, int64_t *place,
           int threads) const;
};

}  // namespace headrace
