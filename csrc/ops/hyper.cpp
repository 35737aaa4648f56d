// Hyper-connections: residual streams beside one another, of which a layer's halves read one sum and to each of which they add
// (arXiv 2409.19606). They go on as they are (transformers' HYV4HyperConnection), or in each other (Glm5NextTextHyperConnection).
//
// Sums run over 64 lanes, as in norms.cpp. S: streams, H: width of one.
#include "common/shares.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t MANY_IN_STREAMS = 16384;     // elements below which waking the other threads costs more than it saves
constexpr int ROWS_AT_ONCE = W >= 16 ? 4 : 1;  // rows that a vector of weights is read for, as registers have room for sums

constexpr int64_t MOST_OUTPUTS = MOST_STREAMS * (2 + MOST_STREAMS);

// The sums over each of R rows, `stride` apart, of its elements times other(element, place, count).
template <int R, typename T, typename F>
HEADRACE_INLINE void row_sums(const T *x, int64_t stride, int64_t width, float *out, F other) {
  constexpr int V = CHUNK / W;
  vf lanes[R][V] = {};
  int64_t i = 0;
  for (; i + CHUNK <= width; i += CHUNK)
    for (int c = 0; c < V; ++c)
      for (int r = 0; r < R; ++r) {
        const vf value = load(x + r * stride + i + c * W);
        lanes[r][c] = madd(value, other(value, i + c * W, W), lanes[r][c]);
      }
  for (int r = 0; r < R; ++r) {
    alignas(64) float sums[CHUNK];
    for (int c = 0; c < V; ++c) store(sums + c * W, lanes[r][c]);
    for (int j = 0; i + j < width; ++j) {
      const vf value = load_part(x + r * stride + i + j, 1);
      sums[j] = madd(value, other(value, i + j, 1), splat(sums[j]))[0];
    }
    out[r] = sum64(sums);
  }
}

float sigmoid(float x) { return 1.0f / (exp(-x) + 1.0f); }

// What streams count of a row: pre [S], and post [S] if a.post.
void counts(const CollectStreams &a, const float *products, float factor, float *pre, float *post) {
  for (int64_t s = 0; s < a.streams; ++s) {
    pre[s] = sigmoid(products[s] * factor * a.scale[0] + a.base[s]) + a.least;
    if (!a.post) continue;
    const int64_t at = a.streams + s;
    post[s] = a.magnitude * sigmoid(products[at] * factor * a.scale[1] + a.base[at]) + a.post_least;
  }
}

// x [S, S] with each row, or each column, divided by its sum.
void divide(const CollectStreams &a, float *x, int64_t from, int64_t along) {
  for (int64_t i = 0; i < a.streams; ++i, x += from) {
    float sum = a.least;
    for (int64_t j = 0; j < a.streams; ++j) sum += x[j * along];
    for (int64_t j = 0; j < a.streams; ++j) x[j * along] /= sum;
  }
}

// How much of each stream goes on in each: rows and columns sum up to about 1 (Sinkhorn and Knopp).
void combine_streams(const CollectStreams &a, const float *products, float factor, float *comb) {
  const int64_t S = a.streams, at = 2 * S;
  for (int64_t i = 0; i < S; ++i) {
    float *const row = comb + i * S;
    float most = -__builtin_inff(), sum = 0.0f;
    for (int64_t j = 0; j < S; ++j) {
      row[j] = products[at + i * S + j] * factor * a.scale[2] + a.base[at + i * S + j];
      most = row[j] > most ? row[j] : most;
    }
    for (int64_t j = 0; j < S; ++j) sum += row[j] = exp(row[j] - most);
    for (int64_t j = 0; j < S; ++j) row[j] = row[j] / sum + a.least;
  }
  divide(a, comb, 1, S);
  for (int round = 1; round < a.rounds; ++round) {
    divide(a, comb, S, 1);
    divide(a, comb, 1, S);
  }
}

template <typename T> void collect_row(const CollectStreams &a, const float *pre, const T *x, T *out) {
  for (int64_t i = 0; i < a.width; i += W) {
    const int64_t n = a.width - i;
    vf sum = load_up_to(x + i, n) * splat(pre[0]);
    for (int64_t s = 1; s < a.streams; ++s) sum = madd(load_up_to(x + s * a.width + i, n), splat(pre[s]), sum);
    store_up_to(out + i, sum, n);
  }
}

template <int R, typename T> void collect_rows(const CollectStreams &a, int64_t row) {
  const int64_t every = a.streams * a.width, outputs = a.outputs();
  const T *x = static_cast<const T *>(a.x) + row * every;
  float squares[R], products[MOST_OUTPUTS][R];
  row_sums<R>(x, every, every, squares, [](vf value, int64_t, int64_t) HEADRACE_ALWAYS_INLINE { return value; });
  for (int64_t o = 0; o < outputs; ++o) {
    const float *weights = a.mixes + o * every;
    row_sums<R>(x, every, every, products[o],
                [=](vf, int64_t at, int64_t n) HEADRACE_ALWAYS_INLINE { return load_up_to(weights + at, n); });
  }
  for (int r = 0; r < R; ++r) {
    float own[MOST_OUTPUTS], pre[MOST_STREAMS];
    for (int64_t o = 0; o < outputs; ++o) own[o] = products[o][r];
    const float factor = 1.0f / __builtin_sqrtf(squares[r] / static_cast<float>(every) + a.eps);
    counts(a, own, factor, pre, a.post ? a.post + (row + r) * a.streams : nullptr);
    if (a.comb) combine_streams(a, own, factor, a.comb + (row + r) * a.streams * a.streams);
    collect_row(a, pre, x + r * every, static_cast<T *>(a.out) + (row + r) * a.width);
  }
}

// One row, all streams of it by vectors: out may be x.
template <typename T> void spread_row(const SpreadStreams &a, int64_t t) {
  const int64_t S = a.streams, from = t * S * a.width;
  const T *part = static_cast<const T *>(a.part) + t * a.width, *x = static_cast<const T *>(a.x) + from;
  T *out = static_cast<T *>(a.out) + from;
  const float *post = a.post + t * S, *comb = a.comb ? a.comb + t * S * S : nullptr;
  for (int64_t i = 0; i < a.width; i += W) {
    const int64_t n = a.width - i;
    const vf made = load_up_to(part + i, n);
    vf own[MOST_STREAMS];
    for (int64_t s = 0; s < S; ++s) own[s] = load_up_to(x + s * a.width + i, n);
    for (int64_t s = 0; s < S; ++s) {
      vf kept = own[s];
      if (comb) {
        kept = own[0] * splat(comb[s]);
        for (int64_t r = 1; r < S; ++r) kept = madd(own[r], splat(comb[r * S + s]), kept);
      }
      store_up_to(out + s * a.width + i, madd(made, splat(post[s]), kept), n);
    }
  }
}

}  // namespace

template <typename T> void collect_streams(const CollectStreams &a) {
  const bool many = a.rows * a.streams * a.width > MANY_IN_STREAMS;
  share_ranges(a.rows, many ? a.threads : 1, [&](int64_t first, int64_t end) {
    for (; first + ROWS_AT_ONCE <= end; first += ROWS_AT_ONCE) collect_rows<ROWS_AT_ONCE, T>(a, first);
    for (; first < end; ++first) collect_rows<1, T>(a, first);
  });
}

template <typename T> void spread_streams(const SpreadStreams &a) {
  const bool many = a.rows * a.streams * a.width > MANY_IN_STREAMS;
  share_each(a.rows, many ? a.threads : 1, [&](int64_t t) { spread_row<T>(a, t); });
}

HEADRACE_BOTH_TYPES(collect_streams, CollectStreams)
HEADRACE_BOTH_TYPES(spread_streams, SpreadStreams)

}  // namespace headrace::HEADRACE_NS
