// Gated delta nets (arXiv 2412.06464): a causal convolution, a recurrence token by token, a norm with a gate. In fp32.
//
// T: rows; K: inputs of the convolution; C: channels, of queries, keys and values; Hk, Hv: key and value heads; D: size of
// queries and keys, V: of values. One order of operations for every cut into segments: a row's bits depend on the rows of its
// own sequence alone. Segments go one after another in each channel, and in each column of the states, so that one may begin
// with the state that another has left.
#include "common/arena.h"
#include "common/shares.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

// The rows of a group that one segment has. Scratch has them from `at` on.
struct Piece {
  int64_t row, count, at, from, to;
};

namespace {

constexpr int64_t TOGETHER = 128;  // rows that go through all passes together: their scratch stays in the caches
constexpr int64_t CHANNELS = 64;   // of a task of the convolution
constexpr int COLUMNS = 32;        // of a state: 256 rows of them fit into L1
constexpr int VECTORS = COLUMNS / W, CHAINS = VECTORS < 4 ? 4 / VECTORS : 1;
constexpr int64_t FEW = 8;  // rows below which waking the other threads costs more than it saves, but for the recurrence

// What the passes hand on: convolved [rows, C]; of each row and value head decay and beta; of each row and key head
// q . k; out [rows, Hv, V].
struct Between {
  float *convolved, *decay, *beta, *qk, *out;
};

// Sum of squares in 64 lanes, as in norms.cpp.
float sum_of_products(const float *x, const float *y, int64_t width) {
  alignas(64) float sums[CHUNK] = {};
  for (int64_t i = 0; i < width; i += CHUNK)
    for (int64_t c = 0; c < CHUNK && i + c < width; c += W) {
      const int64_t n = width - i - c;
      store(sums + c, madd(load_up_to(x + i + c, n), load_up_to(y + i + c, n), load(sums + c)));
    }
  return sum64(sums);
}

void scale(float *x, int64_t width, float factor) {
  for (int64_t i = 0; i < width; i += W) store_up_to(x + i, load_up_to(x + i, width - i) * splat(factor), width - i);
}

float log_of_1_plus_exp(float x) { return x > 20.0f ? x : __builtin_log1pf(exp(x)); }

// One channel block through all pieces: silu of the convolution, and the inputs that the next row will see.
template <typename T> void convolve(const GatedDelta &a, const Piece *pieces, int64_t count, int64_t channel,
                                    float *convolved) {
  const int64_t channels = a.channels(), before = a.kernel - 1;
  const int64_t width = channels - channel < CHANNELS ? channels - channel : CHANNELS;
  T *const last = static_cast<T *>(a.last) + channel;
  alignas(64) float seen[GatedDelta::MOST_INPUTS * CHANNELS];
  for (const Piece *piece = pieces; piece < pieces + count; ++piece) {
    const T *const rows = static_cast<const T *>(a.mixed) + piece->row * a.mixed_stride + channel;
    for (int64_t j = 0; j < before; ++j) {
      if (piece->from < 0) memset(seen + j * CHANNELS, 0, CHANNELS * sizeof(float));
      else widen(last + (piece->from * before + j) * channels, seen + j * CHANNELS, width);
    }
    const auto input = [&](int64_t row, int64_t i) HEADRACE_ALWAYS_INLINE {  // row -1 is the last one before the piece
      return row < 0 ? load(seen + (row + before) * CHANNELS + i) : load_up_to(rows + row * a.mixed_stride + i, width - i);
    };
    for (int64_t t = 0; t < piece->count; ++t)
      for (int64_t i = 0; i < width; i += W) {
        vf y = vf{};
        for (int64_t j = 0; j < a.kernel; ++j)
          y = madd(load_up_to(a.conv + j * channels + channel + i, width - i), input(t - before + j, i), y);
        store_up_to(convolved + (piece->at + t) * channels + channel + i, sigmoid_times(y, y), width - i);
      }
    for (int64_t j = 0; j < before; ++j)
      for (int64_t i = 0; i < width; i += W)
        store_up_to(last + (piece->to * before + j) * channels + i, input(piece->count - before + j, i), width - i);
  }
}

// Queries and keys of a row to unit length, and its gates.
void prepare_row(const GatedDelta &a, int64_t row, int64_t at, const Between &b) {
  const int64_t keys = a.key_heads * a.key_dim;
  const float root = 1.0f / __builtin_sqrtf(static_cast<float>(a.key_dim));
  for (int64_t h = 0; h < a.key_heads; ++h) {
    float *const q = b.convolved + at * a.channels() + h * a.key_dim, *const k = q + keys;
    scale(q, a.key_dim, root / __builtin_sqrtf(sum_of_products(q, q, a.key_dim) + 1e-6f));
    scale(k, a.key_dim, 1.0f / __builtin_sqrtf(sum_of_products(k, k, a.key_dim) + 1e-6f));
    b.qk[at * a.key_heads + h] = sum_of_products(q, k, a.key_dim);
  }
  const float *const gates = a.gates + row * 2 * a.value_heads;
  for (int64_t h = 0; h < a.value_heads; ++h) {
    b.beta[at * a.value_heads + h] = 1.0f / (1.0f + exp(-gates[h]));
    const float step = log_of_1_plus_exp(gates[a.value_heads + h] + a.dt_bias[h]);
    b.decay[at * a.value_heads + h] = exp(-a.rate[h] * step);
  }
}

// What a token reads of a state S [D, COLUMNS]: k S and q S. Each is summed by CHAINS.
struct Sums {
  vf k[VECTORS], q[VECTORS];
};

// S = decay S + k (x) delta, if there is a token to take in, and meanwhile what the next token, if there is one, reads of it.
template <bool UPDATE, bool READ>
HEADRACE_APART void pass(float *state, int64_t size, float decay, const float *k, const vf *delta, const float *next_k,
                         const float *next_q, Sums &sums) {
  vf by_k[CHAINS][VECTORS] = {}, by_q[CHAINS][VECTORS] = {}, new_values[VECTORS];
  if constexpr (UPDATE) HEADRACE_EACH(c, VECTORS, new_values[c] = delta[c]);
  const auto take = [&](int64_t i, auto chain) HEADRACE_ALWAYS_INLINE {
    float *const line = state + i * COLUMNS;
    HEADRACE_EACH(c, VECTORS, {
      vf s = load(line + c * W);
      if constexpr (UPDATE) {
        s = madd(splat(k[i]), new_values[c], s * splat(decay));
        store(line + c * W, s);
      }
      if constexpr (READ) {
        by_k[chain][c] = madd(splat(next_k[i]), s, by_k[chain][c]);
        by_q[chain][c] = madd(splat(next_q[i]), s, by_q[chain][c]);
      }
    });
  };
  int64_t i = 0;
  for (; i + CHAINS <= size; i += CHAINS) HEADRACE_EACH(chain, CHAINS, take(i + chain, Constant<chain>{}));
  for (; i < size; ++i) take(i, Constant<0>{});
  if constexpr (READ) {
    HEADRACE_EACH(c, VECTORS, {
      sums.k[c] = by_k[0][c];
      sums.q[c] = by_q[0][c];
    });
    for (int chain = 1; chain < CHAINS; ++chain)
      for (int c = 0; c < VECTORS; ++c) {
        sums.k[c] = sums.k[c] + by_k[chain][c];
        sums.q[c] = sums.q[c] + by_q[chain][c];
      }
  }
}

// Columns of the state of one value head through all pieces.
void recur(const GatedDelta &a, const Piece *pieces, int64_t count, int64_t head, int64_t column, const Between &b) {
  const int64_t D = a.key_dim, V = a.value_dim, Hv = a.value_heads, channels = a.channels();
  const int64_t key_head = head / (Hv / a.key_heads), keys = a.key_heads * D;
  const int64_t width = V - column < COLUMNS ? V - column : COLUMNS;
  alignas(64) float state[GatedDelta::MOST_KEY_DIM * COLUMNS];
  const auto place = [&](int64_t slot) { return a.matrices + (slot * Hv + head) * D * V + column; };
  for (const Piece *piece = pieces; piece < pieces + count; ++piece) {
    if (piece->from < 0 || width < COLUMNS) memset(state, 0, D * COLUMNS * sizeof(float));
    if (piece->from >= 0)
      for (int64_t i = 0; i < D; ++i) memcpy(state + i * COLUMNS, place(piece->from) + i * V, width * sizeof(float));
    const float *q = b.convolved + piece->at * channels + key_head * D;
    Sums sums;
    pass<false, true>(state, D, 0.0f, nullptr, nullptr, q + keys, q, sums);
    for (int64_t t = piece->at; t < piece->at + piece->count; ++t, q += channels) {
      const float decay = b.decay[t * Hv + head], beta = b.beta[t * Hv + head], qk = b.qk[t * a.key_heads + key_head];
      const float *const v = b.convolved + t * channels + 2 * keys + head * V + column;
      vf delta[VECTORS];
      for (int c = 0; c < VECTORS && c * W < width; ++c) {
        delta[c] = (load_up_to(v + c * W, width - c * W) - sums.k[c] * splat(decay)) * splat(beta);
        const vf read = madd(splat(qk), delta[c], sums.q[c] * splat(decay));
        store_up_to(b.out + (t * Hv + head) * V + column + c * W, read, width - c * W);
      }
      for (int c = static_cast<int>((width + W - 1) / W); c < VECTORS; ++c) delta[c] = vf{};
      const float *const k = q + keys, *const next = q + channels;
      if (t + 1 < piece->at + piece->count) pass<true, true>(state, D, decay, k, delta, next + keys, next, sums);
      else pass<true, false>(state, D, decay, k, delta, nullptr, nullptr, sums);
    }
    for (int64_t i = 0; i < D; ++i) memcpy(place(piece->to) + i * V, state + i * COLUMNS, width * sizeof(float));
  }
}

// RMS norm of each value head, times silu of its gate.
template <typename T> void write_gated(const GatedDelta &a, int64_t row, const float *from) {
  const int64_t V = a.value_dim;
  const T *const gates = static_cast<const T *>(a.mixed) + row * a.mixed_stride + a.channels();
  T *const out = static_cast<T *>(a.out) + row * a.value_heads * V;
  for (int64_t h = 0; h < a.value_heads; ++h) {
    const float *const x = from + h * V;
    const float factor = 1.0f / __builtin_sqrtf(sum_of_products(x, x, V) / static_cast<float>(V) + a.eps);
    for (int64_t i = 0; i < V; i += W) {
      const vf gate = load_up_to(gates + h * V + i, V - i);
      const vf y = load_up_to(x + i, V - i) * splat(factor) * load_up_to(a.norm + i, V - i);
      store_up_to(out + h * V + i, y * sigmoid_times(gate, gate), V - i);
    }
  }
}

template <typename T> void run_group(const GatedDelta &a, const Piece *pieces, int64_t count, int64_t rows) {
  const int64_t channels = a.channels(), Hv = a.value_heads, V = a.value_dim;
  Scratch scratch = arena(room<float>(rows * channels) + 2 * room<float>(rows * Hv) + room<float>(rows * a.key_heads) +
                          room<float>(rows * Hv * V));
  const Between b = {scratch.take<float>(rows * channels), scratch.take<float>(rows * Hv), scratch.take<float>(rows * Hv),
                     scratch.take<float>(rows * a.key_heads), scratch.take<float>(rows * Hv * V)};
  const int threads = rows < FEW ? 1 : a.threads;
  const auto each_row = [&](auto f) {
    share_each(count, threads, [&](int64_t i) {
      for (int64_t t = 0; t < pieces[i].count; ++t) f(pieces[i].row + t, pieces[i].at + t);
    });
  };
  share_each((channels + CHANNELS - 1) / CHANNELS, threads,
             [&](int64_t i) { convolve<T>(a, pieces, count, i * CHANNELS, b.convolved); });
  each_row([&](int64_t row, int64_t at) { prepare_row(a, row, at, b); });
  const int64_t blocks = (V + COLUMNS - 1) / COLUMNS;
  share_each(Hv * blocks, a.threads, [&](int64_t i) { recur(a, pieces, count, i / blocks, i % blocks * COLUMNS, b); });
  each_row([&](int64_t row, int64_t at) { write_gated<T>(a, row, b.out + at * Hv * V); });
}

}  // namespace

template <typename T> void gated_delta(const GatedDelta &a) {
  constexpr int64_t PART = 16;  // rows of a piece: enough for both threads to have some
  Piece pieces[TOGETHER];
  int64_t count = 0, rows = 0;
  const auto run = [&] {
    if (count) run_group<T>(a, pieces, count, rows);
    count = rows = 0;
  };
  for (int64_t n = 0; n < a.segment_count; ++n) {
    const DeltaSegment &segment = a.segments[n];
    int64_t from = segment.from;
    for (int64_t row = segment.row_begin; row < segment.row_end;) {
      if (rows == TOGETHER) run();
      int64_t length = segment.row_end - row;
      if (length > PART) length = PART;
      if (length > TOGETHER - rows) length = TOGETHER - rows;
      pieces[count++] = {row, length, rows, from, segment.to};
      rows += length;
      row += length;
      from = segment.to;
    }
  }
  run();
}

HEADRACE_BOTH_TYPES(gated_delta, GatedDelta)

}  // namespace headrace::HEADRACE_NS
