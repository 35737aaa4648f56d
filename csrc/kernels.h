// What every instruction set provides, as plain C types: arguments by pointer, no ownership, sizes in elements.
//
// R, T: rows; Hq, Hkv: query and KV heads; D: head size; H: width of a row; 64: tokens in a chunk.
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

struct Attend {
  const void *q;             // [R, Hq, D], rows q_stride apart
  const void *k;             // [slots, Hkv, D, 64], or in bf16 pairs: see vnni.h
  const void *v;             // [slots, Hkv, 64, D], likewise
  void *out;                 // [R, Hq, D]
  const Item *items;         // [n], each row's in ascending key_start
  const int64_t *positions;  // [R]
  const float *bias;         // [Hq, bias_len] or null
  int64_t rows, q_stride, item_count, heads, kv_heads, dim, window, bias_len;
  float scale;
  int threads;
  const float *k_scale, *v_scale;  // [slots, Hkv, 64] where k and v are int8 (see quantised.h), else null
  RunningState from, to;           // the state to continue from; the state to leave instead of `out`. They share no memory
};

// left = left merged with right, all lanes. base2: m is in units of log 2, as in vnni.h.
struct MergePartials {
  Partial left, right;
  int64_t lanes, dim;
  bool base2;
  int threads;
};

// out [lanes, D] = attention of what was merged, lse [lanes] (or null) the logarithm of its sum. A lane is one (row, head).
struct Finish {
  Partial total, block;
  void *out;
  float *lse;
  int64_t lanes, dim;
  bool base2;
  int threads;
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
  void *k, *v;                     // the pools, as in Attend
  const int32_t *slots, *offsets;  // [T]
  int64_t rows, k_stride, v_stride, kv_heads, dim;
  int threads;
  float *k_scale, *v_scale;  // as in Attend
};

// out = norm(x) * weight + bias, head by head: `width` contiguous elements each. out may be x.
struct Norm {
  const void *x, *weight, *bias;  // [T, heads, H] rows `stride` apart, [H], [H] or null
  void *out;                      // as x
  int64_t rows, stride, heads, width;
  float eps;
  int threads;
};

// out[t, i] = f(x[t, i]); silu_mul reads rows of 2 * width.
struct Unary {
  const void *x;
  void *out;
  int64_t rows, width;
  int threads;
};

// What is done to the products y [T, outputs] on their way to memory, each operation with its own rounding. residual
// [T, outputs] or null: residual + y; it may be where they go. gated: silu of the first half times the second, [T, outputs / 2],
// whose weights are packed in turn, 64 gates and the 64 that they let through. Neither goes with `wide`.
// tops, with `wide` alone, or null: the greatest of each row's products in each block of 64 outputs, NaN if one of them is,
// [ceil(outputs / TOPS)][tops_width(T)]. What is behind the rows is left as it is.
struct Epilogue {
  const void *residual = nullptr;
  bool gated = false;
  float *tops = nullptr;
};

constexpr int64_t TOPS = 64;  // outputs of a block
constexpr int64_t tops_width(int64_t rows) { return (rows + 15) / 16 * 16; }
constexpr int64_t tops_size(int64_t rows, int64_t outputs) { return (outputs + TOPS - 1) / TOPS * tops_width(rows); }

// out[t, n] = sum over k of x[t, k] * w[n, k], plus bias[n], with fp32 sums; all of one type, but out is fp32 if `wide`.
struct Linear {
  const void *x, *w, *bias;  // [T, inputs] rows x_stride apart, packed (linear.cpp, linear_plain.cpp), [outputs] or null
  void *out;                 // [T, outputs]
  int64_t rows, x_stride, inputs, outputs;
  bool wide;
  int threads;
  Epilogue epilogue = {};
};

// out = x + y, rounded once; out may be x.
struct Sum {
  const void *x, *y;
  void *out;
  int64_t elements;
  int threads;
};

// The same with weights of `bits` 8 or 4 under scales: see linear_quant.cpp. x, bias and a narrow out are of one type.
struct LinearQuant {
  const void *x, *codes, *scales, *bias;
  void *out;
  int64_t rows, x_stride, inputs, outputs;
  int bits;
  bool wide;
  int threads;
  Epilogue epilogue = {};
};

struct Rotary {
  const void *x;         // [T, heads, D], rows x_stride apart
  void *out;             // [T, heads, D], rows out_stride apart; may be x
  const float *cos_sin;  // [T, rotary] = (cos, sin), each rotary / 2 wide
  int64_t rows, x_stride, out_stride, heads, dim, rotary;
  int threads;
};

enum class Element { bf16, fp32, int8 };
enum class Format { raw, int8, int4 };  // see stored.cpp

// Chunks of one layer and their stored bytes, one way or the other.
struct Stored {
  void *sections;            // of chunk i from i * stride bytes on
  void *k, *v;               // the pools, as in Attend; no k: v is [slots, 64, D]
  float *k_scale, *v_scale;  // [slots, Hkv, 64] of int8 pools, else null
  const int32_t *slots;      // [count]
  bool *fits;                // [count]: whether the format holds the chunk's numbers; null when loading
  int64_t stride, count, heads, dim;
  Element element;
  Format format;
  bool vnni;
};

// The greatest element of each row of x [R, N], N at least 1, and where it is first; a NaN is greater than all else.
struct Greatest {
  const float *x;
  float *value;    // [R]
  int64_t *index;  // [R]
  int64_t rows, width;
  int threads;
  const float *tops;  // of x, if they are known (see Epilogue), else null
};

// Whether the first cache of a core holds 32 KB or less, as those of Zen 4 do: half a chunk of keys and values and the half
// that is read next leave no room in it. What is fetched ahead goes to the second one then. (Zen 5 and Sapphire Rapids: 48.)
extern bool small_l1;

// Whether this processor multiplies bf16, whatever set is in use.
extern const bool multiplies_bf16;

// One entry per element type: 0 is bf16, 1 is fp32. exp stands here for the test of its accuracy.
struct Kernels {
  void (*attend[2])(const Attend &);
  void (*append[2])(const Append &);
  void (*finish[2])(const Finish &);
  void (*merge_partials)(const MergePartials &);
  void (*merge_states)(const MergeStates &);
  void (*rms_norm[2])(const Norm &);
  void (*layer_norm[2])(const Norm &);
  void (*silu_mul[2])(const Unary &);
  void (*gelu[2])(const Unary &);
  void (*gelu_tanh[2])(const Unary &);
  void (*relu[2])(const Unary &);
  void (*add[2])(const Sum &);
  void (*rotary[2])(const Rotary &);
  void (*linear_quant[2])(const LinearQuant &);
  void (*linear_plain[2])(const Linear &);
  void (*linear_pairs)(const Linear &);  // of bf16, whose weights lie otherwise; null where there are no products of pairs
  void (*greatest)(const Greatest &);
  void (*store_chunks)(const Stored &);
  void (*load_chunks)(const Stored &);
  void (*exp)(const float *x, float *out, int64_t n);
  // Limits of the machine, for benchmarks: see probe.cpp.
  uint32_t (*probe_read)(const void *from, int64_t bytes, int threads);
  int64_t (*probe_multiply)(int64_t rounds, int threads);  // operations done
};

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512bf16 {
extern const Kernels kernels;
}
namespace amx {
extern const Kernels kernels;
}

}  // namespace headrace
