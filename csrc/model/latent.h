// What latent attention has in place of the product that makes queries, keys and values, and between attention and `out`.
#pragma once

#include "model/operations.h"

namespace headrace {

// Bytes of memory that either function needs for `rows` rows.
int64_t latent_scratch(const Latent &latent, int64_t heads, int64_t rows);

// x [T, H], normed -> queries and the one key [T, Hq + 1, D], rotated. cos_sin: the layer's rotation, rows `turn_stride` apart; null:
// nothing is rotated. A block without heads makes keys alone.
void project_latents(const DecoderLayer &block, const Operations &run, const bf16 *x, const float *cos_sin, int64_t turn_stride,
                     bf16 *heads, void *scratch);

// attended [T, Hq, D] -> each head's value [T, Hq, value], in the scratch memory.
bf16 *values_of_latents(const DecoderLayer &block, const Operations &run, const bf16 *attended, void *scratch);

}  // namespace headrace
