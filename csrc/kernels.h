// What every instruction set provides, as plain C types: arguments by pointer, no ownership, sizes in elements.
//
// R, T: rows; Hq, Hkv: query and KV heads; D: head size; H: width of a row; 64: tokens in a chunk.
#pragma once

#include <cstdint>

#include "attention/arguments.h"
#include "ops/recurrent.h"

namespace headrace {

// out = norm(x) * (weight + offset) + bias, head by head: `width` contiguous elements each. out may be x. offset: of rms_norm alone.
struct Norm {
  const void *x, *weight, *bias;  // [T, heads, H] rows `stride` apart, [H], [H] or null
  void *out;                      // as x
  int64_t rows, stride, heads, width;
  float eps;
  int threads;
  float offset = 0.0f;
};

// out[t, i] = f(x[t, i]); those named _mul read rows of 2 * width, or where there are second halves [T, width] of their own, which
// may be where they go, the first ones of rows x_stride apart. xielu: second is its two numbers, fp32.
struct Unary {
  const void *x;
  void *out;
  int64_t rows, width;
  int threads;
  const void *second = nullptr;
  int64_t x_stride = 0;
};

// Hyper-connections, csrc/ops/hyper.cpp: with p = mixes x / rms(x), out = the sum over streams of (sigmoid(p scale[0] + base) +
// least) x, and post = magnitude sigmoid(p scale[1] + base) + post_least, by which spread_streams adds what is made of out. comb: how
// much of each stream goes on in each: softmax(p scale[2] + base) + least, columns and rows divided by their sums in turn.
constexpr int64_t MOST_STREAMS = 8;
struct CollectStreams {
  const void *x;  // [T, S, H]
  // [outputs, S H], [outputs], [1 to 3]: of pre [S], then of post [S] if there is one, then of comb [S, S] if there is one.
  const float *mixes, *base, *scale;
  void *out;    // [T, H]
  float *post;  // [T, S], or null
  float *comb;  // [T, from S, to S], or null
  int64_t rows, streams, width;
  float eps, least, magnitude, post_least;
  int rounds;  // of comb
  int threads;

  int64_t outputs() const { return streams * (1 + (post ? 1 : 0) + (comb ? streams : 0)); }
};

// out = comb x + post part, or x + post part without comb, stream by stream. out may be x.
struct SpreadStreams {
  const void *x, *part;  // [T, S, H], [T, H]
  const float *post;     // [T, S]
  const float *comb;     // [T, S, S], or null
  void *out;             // as x
  int64_t rows, streams, width;
  int threads;
};

enum class Gate { silu, gelu_tanh, swiglu_oai, swiglu_clamped };

// What is done to the products y [T, outputs] on their way to memory, each operation with its own rounding. residual
// [T, outputs] or null: residual + scale * y; it may be where they go. gated: `gate` of scale times the first half, times the second,
// [T, outputs / 2], whose weights are packed in turn, 64 gates and the 64 that they let through; swiglus take both halves. Neither goes with `wide`.
// tops, with `wide` alone, or null: the greatest of each row's products in each block of 64 outputs, NaN if one of them is,
// [ceil(outputs / TOPS)][tops_width(T)]. What is behind the rows is left as it is.
struct Epilogue {
  const void *residual = nullptr;
  bool gated = false;
  float *tops = nullptr;
  Gate gate = Gate::silu;
  float scale = 1.0f;
};

constexpr int64_t TOPS = 64;  // outputs of a block
static constexpr int64_t tops_width(int64_t rows) { return (rows + 15) / 16 * 16; }
static constexpr int64_t tops_size(int64_t rows, int64_t outputs) { return (outputs + TOPS - 1) / TOPS * tops_width(rows); }

// Rows first .. last - 1 of a product and their own weight, of the shape and form of the others: one expert's. order: as in
// LinearQuant, of all groups or of none. Groups go by ascending rows.
struct Group {
  const void *weight, *scales, *bias;
  const int32_t *order;
  int64_t first, last;
};

// The groups of a product, whose other rows are left alone; none: its rows share the one weight that it names itself.
struct Groups {
  const Group *each = nullptr;
  int64_t count = 0;
};

// out[t, n] = sum over k of x[t, k] * w[n, k], plus bias[n], with fp32 sums; all of one type, but out is fp32 if `wide`.
struct Linear {
  const void *x, *w, *bias;  // [T, inputs] rows x_stride apart, packed (linear.cpp, linear_plain.cpp), [outputs] or null
  void *out;                 // [T, outputs]
  int64_t rows, x_stride, inputs, outputs;
  bool wide;
  int threads;
  Epilogue epilogue = {};
  int64_t out_stride = 0;  // of rows of out, where that is wider than `outputs` and there is no epilogue; else 0
  Groups groups = {};
};

// out = x + scale * y, the product rounded and the sum; out may be x.
struct Sum {
  const void *x, *y;
  void *out;
  int64_t elements;
  int threads;
  float scale = 1.0f;
};

// out [T, width] = x * scale, or x * y of those two; rows lie so far apart. out may be x.
struct Times {
  const void *x, *y;  // y: or null
  void *out;
  int64_t rows, width, x_stride, y_stride, out_stride;
  float scale;
  int threads;
};

// out [T, width] = scale * the rows [index[t]] of a table, rounded once. The indices are those of rows that there are.
struct Embed {
  const void *table;
  const int64_t *index;
  void *out;
  int64_t rows, width;
  float scale;
};

// How a weight lies: linear_plain.cpp, linear.cpp, and the others, as codes under scales, linear_quant.cpp; w8a8, which rounds
// rows too, linear_w8a8.cpp. To add a format of codes: its name here, its struct in linear/codes.h.
#define HEADRACE_FORMS(FORM)                                                                                              \
  FORM(plain) FORM(pairs) FORM(int8) FORM(bytes) FORM(int4) FORM(uint4) FORM(uint5) FORM(int6) FORM(e2m1) FORM(e4m3)      \
  FORM(w8a8) FORM(uint2) FORM(int3) FORM(iq4) FORM(iq3_s) FORM(iq3_xxs) FORM(iq2) FORM(iq1) FORM(nf4)
#define HEADRACE_NAME(name) name,
enum class Form { HEADRACE_FORMS(HEADRACE_NAME) };
#undef HEADRACE_NAME

// Types of stored scales and of sub-scales, and what is added to a code times its scale: kernels.formats says what they mean.
#define HEADRACE_NUMBERS(NUMBER) NUMBER(fp32) NUMBER(bf16) NUMBER(fp16) NUMBER(e8m0)
#define HEADRACE_SUBS(SUBS) SUBS(none) SUBS(whole) SUBS(e4m3)
#define HEADRACE_OFFSETS(OFFSET) OFFSET(none) OFFSET(minimum) OFFSET(zero)
#define HEADRACE_NAME(name) name,
enum class Number { HEADRACE_NUMBERS(HEADRACE_NAME) };
enum class Subs { HEADRACE_SUBS(HEADRACE_NAME) };
enum class Offset { HEADRACE_OFFSETS(HEADRACE_NAME) };
#undef HEADRACE_NAME

// How codes are scaled: see linear/scales.h. block, group: inputs under one scale, and under one pair of sub-scale and offset;
// block 0: one scale fp32 for all inputs of an output. run: inputs whose products are added up before they are scaled, a power
// of 2 and a divisor of the group.
struct Scaling {
  Number number;
  Offset offset;
  Subs subs;
  int64_t block, group, run;
};

// The same with weights that are codes: see linear_quant.cpp. x, bias and a narrow out are of one type.
struct LinearQuant {
  const void *x, *codes, *scales, *bias;
  void *out;
  int64_t rows, x_stride, inputs, outputs;
  Form form;
  bool wide;
  int threads;
  Epilogue epilogue = {};
  Scaling scaling = {};
  const int32_t *order = nullptr;  // [inputs]: which element of x each code is for; null: its own
  int64_t out_stride = 0;          // as in Linear
  Groups groups = {};
};

// out [T, inputs] = scale * the rows [index[t]] of a table that lies as such a weight, or as one of Linear's: rounded, then
// multiplied and rounded again. The indices are those of rows that there are. No form w8a8.
struct PackedRows {
  const void *weight, *scales;
  const int64_t *index;
  void *out;
  int64_t rows, inputs;
  Form form;
  Scaling scaling;
  const int32_t *order;  // as in LinearQuant
  float scale;
  int threads;
};

// How scores choose (config.RoutingSpec). sigmoid: they are the sigmoids of logits, else their softmax. Of `groups` of experts the
// met_groups best are open, by the sum of their `summed` greatest scores. scale: of shares.
struct Routing {
  bool sigmoid = false;
  int64_t groups = 1, met_groups = 1, summed = 1;
  float scale = 1.0f;
};

// The experts of each row of x [R, N] and their shares: scores of the row, then its `chosen` greatest, the greatest first and of
// equal ones the first. normalised: the shares of a row are divided by their sum. correction: is added to scores for the choice.
struct Route {
  const float *x;
  int32_t *expert;  // [R, chosen]
  float *share;     // [R, chosen]
  int64_t rows, experts, chosen;
  bool normalised;
  int threads;
  Routing routing;
  const float *correction;  // [N], or null
};

// out[t] = the sum over j of share[t, j] * y[place[t, j]], in fp32 and in this order, rounded once; then residual[t] + that, if
// there is a residual [R, H], which may be where they go.
struct Combine {
  const void *y;         // [R chosen, H]
  const int32_t *place;  // [R, chosen]
  const float *share;    // [R, chosen]
  const void *residual;
  void *out;  // [R, H]
  int64_t rows, chosen, width;
  int threads;
};

struct Rotary {
  const void *x;         // [T, heads, D], rows x_stride apart
  void *out;             // [T, heads, D], rows out_stride apart; may be x
  const float *cos_sin;  // [T, rotary] = (cos, sin), each rotary / 2 wide, rows turn_stride apart
  int64_t rows, x_stride, out_stride, heads, dim, rotary, turn_stride;
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

// Of each row of x [R, N], N at least 1: its greatest element (NaN if one is), the sum of e^(x - that), and how many elements
// are above its target's. target [R]: places in 0 .. N-1. Sums are void where the greatest is not finite.
struct SoftmaxSums {
  const float *x;
  const int64_t *target;
  float *greatest;  // [R]
  double *sum;      // [R]
  int64_t *above;   // [R]
  int64_t rows, width;
  int threads;
};

// Whether the first cache of a core holds 32 KB or less, as those of Zen 4 do: half a chunk of keys and values and the half
// that is read next leave no room in it. What is fetched ahead goes to the second one then. (Zen 5 and Sapphire Rapids: 48.)
extern bool small_l1;

// Whether this processor multiplies bf16, whatever set is in use.
extern const bool multiplies_bf16;

// All operations but activations. PER_TYPE: in two types, 0 is bf16, 1 is fp32. PAIRS: for processors that multiply pairs of
// bf16, null for the others. To add one: a line here, a .cpp, the binding and its stub. exp stands here for the test of its accuracy;
// probe_*: limits of the machine, for benchmarks (probe.cpp).
#define HEADRACE_OPERATIONS(PER_TYPE, FUNCTION, PAIRS)                        \
  PER_TYPE(attend, Attend)                                                    \
  PER_TYPE(append, Append)                                                    \
  PER_TYPE(index_scores, IndexScores)                                         \
  PER_TYPE(block_scores, BlockScores)                                         \
  PER_TYPE(gather, Gather)                                                    \
  PER_TYPE(finish, Finish)                                                    \
  PER_TYPE(rms_norm, Norm)                                                    \
  PER_TYPE(layer_norm, Norm)                                                  \
  PER_TYPE(collect_streams, CollectStreams)                                   \
  PER_TYPE(spread_streams, SpreadStreams)                                     \
  PER_TYPE(add, Sum)                                                          \
  PER_TYPE(times, Times)                                                      \
  PER_TYPE(embed, Embed)                                                      \
  PER_TYPE(rotary, Rotary)                                                    \
  PER_TYPE(gated_delta, GatedDelta)                                           \
  PER_TYPE(mamba2, Mamba2)                                                    \
  PER_TYPE(short_conv, ShortConv)                                             \
  PER_TYPE(linear_quant, LinearQuant)                                         \
  PER_TYPE(linear_plain, Linear)                                              \
  PER_TYPE(packed_rows, PackedRows)                                           \
  PER_TYPE(combine, Combine)                                                  \
  PAIRS(linear_pairs, void, (const Linear &))                                 \
  FUNCTION(merge_partials, void, (const MergePartials &))                     \
  FUNCTION(merge_states, void, (const MergeStates &))                         \
  FUNCTION(soft_cap, void, (float *x, int64_t n, float scale, float cap, int threads)) /* cap tanh(scale x / cap) */ \
  FUNCTION(greatest, void, (const Greatest &))                                \
  FUNCTION(route, void, (const Route &))                                      \
  FUNCTION(softmax_sums, void, (const SoftmaxSums &))                         \
  FUNCTION(store_chunks, void, (const Stored &))                              \
  FUNCTION(load_chunks, void, (const Stored &))                               \
  FUNCTION(exp, void, (const float *x, float *out, int64_t n))                \
  FUNCTION(probe_read, uint32_t, (const void *from, int64_t bytes, int threads)) \
  FUNCTION(probe_multiply, int64_t, (int64_t rounds, int threads)) /* operations done */

// Each in two types, of Unary, and in Python by the same name. To add one: its name here, activations.cpp.
#define HEADRACE_ACTIVATIONS(ACTIVATION) \
  ACTIVATION(silu_mul) ACTIVATION(gelu_tanh_mul) ACTIVATION(swiglu_oai_mul) ACTIVATION(swiglu_clamped_mul) \
  ACTIVATION(sigmoid_mul) \
  ACTIVATION(gelu) ACTIVATION(gelu_tanh) ACTIVATION(relu) ACTIVATION(relu2) ACTIVATION(xielu)

struct Kernels {
#define HEADRACE_PER_TYPE(name, Arguments) void (*name[2])(const Arguments &);
#define HEADRACE_FUNCTION(name, result, parameters) result(*name) parameters;
#define HEADRACE_ACTIVATION(name) HEADRACE_PER_TYPE(name, Unary)
  HEADRACE_OPERATIONS(HEADRACE_PER_TYPE, HEADRACE_FUNCTION, HEADRACE_FUNCTION)
  HEADRACE_ACTIVATIONS(HEADRACE_ACTIVATION)
#undef HEADRACE_PER_TYPE
#undef HEADRACE_FUNCTION
#undef HEADRACE_ACTIVATION
};

// Instruction sets, from plain to fast; each needs those before it. Null addresses: the build left them out. To add one: its
// name here, its options in isa/isas.cmake, what it asks of a processor in isa/features.h.
#define HEADRACE_ISAS(SET) SET(portable) SET(avx2) SET(avx512) SET(avx512bf16) SET(amx)

#define HEADRACE_SET(name)                               \
  namespace name {                                       \
  extern const Kernels kernels __attribute__((weak));    \
  }
HEADRACE_ISAS(HEADRACE_SET)
#undef HEADRACE_SET

}  // namespace headrace
