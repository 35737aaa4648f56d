// What attention takes, as plain C types: arguments by pointer, no ownership, sizes in elements. Part of kernels.h.
#pragma once

#include <cstdint>

namespace headrace {

constexpr int CHUNK = 64;
constexpr int BLOCK = 2048;  // keys in a block of the canonical merge order (types.BLOCK_CHUNKS chunks)

struct Item {
  int32_t slot, key_start, row_begin, row_end;
};

// Attention of rows, unnormalised: acc [R, Hq, D], m and l [R, Hq].
struct Partial {
  float *acc, *m, *l;
};

// Where rows stand in the canonical merge order. block_of [R]: index of the block that `block` holds, -1 before the first; null
// where there is no state.
struct RunningState {
  Partial total, block;
  int32_t *block_of;
};

// The first key that a row at `position` sees: of the last `window`; below 0, of its own block of -window keys.
inline int64_t first_seen(int64_t position, int64_t window) {
  return window < 0 ? position - position % -window : position - window + 1;
}

struct Attend {
  const void *q;             // [R, Hq, D], rows q_stride apart
  const void *k;             // [slots, Hkv, D, 64], or in bf16 pairs: see vnni.h; null: values are the keys too
  const void *v;             // [slots, Hkv, 64, D], likewise
  void *out;                 // [R, Hq, D]
  const Item *items;         // [n], each row's in ascending key_start
  const int64_t *positions;  // [R]
  const float *bias;         // [Hq, bias_len] or null
  int64_t rows, q_stride, item_count, heads, kv_heads, dim, window, bias_len;
  float scale, cap;  // scores s become cap * tanh(scale * s / cap), or scale * s where cap is 0
  int threads;
  const float *k_scale, *v_scale;  // [slots, Hkv, 64] where k and v are int8 (see quantised.h), else null
  RunningState from, to;           // the state to continue from; the state to leave instead of `out`. They share no memory
  const float *sinks;              // [Hq] or null: the score of a key without a value, which every row of `out` sees at its end
};

// left = left merged with right, all lanes. base2: m is in units of log 2, as in vnni.h.
struct MergePartials {
  Partial left, right;
  int64_t lanes, dim;
  bool base2;
  int threads;
};

// out [lanes, D] = attention of what was merged, lse [lanes] (or null) the logarithm of its sum. A lane is one (row, head), of
// `heads` heads. sinks: as in Attend, not in lse.
struct Finish {
  Partial total, block;
  void *out;
  float *lse;
  int64_t lanes, dim;
  bool base2;
  int threads;
  const float *sinks;
  int64_t heads;
};

// Attention over the union of two disjoint segments: out [lanes, D] and lse [lanes] each.
struct MergeStates {
  const float *left_out, *left_lse, *right_out, *right_lse;
  float *out, *lse;
  int64_t lanes, dim;
  int threads;
};

struct Append {
  const void *k_new, *v_new;       // [T, Hkv, D], rows k_stride and v_stride apart
  void *k, *v;                     // the pools, as in Attend; no k: of values alone
  const int32_t *slots, *offsets;  // [T]
  int64_t rows, k_stride, v_stride, kv_heads, dim;
  int threads;
  float *k_scale, *v_scale;  // as in Attend
};

// What an indexer makes of keys, by which rows choose those that they attend to: indexer.cpp. N: heads of the indexer, I: their
// size. out[r][key] = sum over its heads of weights[r][n] * max(q[r][n] . k, 0), -inf for keys behind the row.
struct IndexScores {
  const void *q;             // [R, N, I]
  const float *weights;      // [R, N]
  const void *v;             // [slots, 64, D], as in Attend with one KV head: the first I numbers of each are the indexer's key
  const float *v_scale;      // [slots, 64] of int8, else null
  const Item *items;         // [n]
  const int64_t *positions;  // [R]
  float *out;                // [R, keys / pool], of the items alone
  int64_t rows, item_count, heads, size, dim, keys;
  int threads;
  // Above 1: so many keys, which divide a chunk, are one, by weights of each number: the softmax over them of the I numbers that are
  // stored behind the key, and `places` [pool, I]. What is not whole before a row is -inf to it.
  int64_t pool = 1;
  const float *places = nullptr;
};

// The same of blocks of keys, for each KV head by itself, of which the indexer has a head: N of both. Its key of a token is the first
// I / N numbers of each of the token's keys. out[r][n][chunk] = the greatest q[r][n] . k of those keys of the chunk that the row sees.
struct BlockScores {
  const void *q;             // [R, N, I]
  const void *k;             // [slots, N, D, 64], as in Attend
  const float *k_scale;      // [slots, N, 64] of int8, else null
  const Item *items;         // [n]
  const int64_t *positions;  // [R]
  float *out;                // [R, N, chunks], of the items alone
  int64_t rows, item_count, heads, size, dim, chunks;
  int threads;
};

// What rows have chosen, side by side in chunks of their own: numbers first .. D - 1 of each value of [slots, 64, D]. Both pools
// lie as their own D says (vnni.h).
struct Gather {
  const void *v;
  const float *v_scale;   // [slots, 64] of int8, else null
  void *to;               // [R, chunks, 64, D - first]
  float *to_scale;        // [R, chunks, 64] of int8, else null
  const int32_t *tables;  // [R, table]: slots of each row's chunks
  const int32_t *chosen;  // [R, count]: keys, ascending
  int64_t rows, count, table, chunks, dim, first;
  int threads;
};

}  // namespace headrace
