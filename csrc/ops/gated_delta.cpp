// Gated delta nets (arXiv 2412.06464): a causal convolution, a recurrence token by token, a norm with a gate. In fp32.
//
// T: rows; K: inputs of the convolution; C: channels, of queries, keys and values; Hk, Hv: key and value heads; D: size of
// queries and keys, V: of values. One order of operations for every cut into segments: a row's bits depend on the rows of its
// own sequence alone.
#include "ops/state_rows.h"

namespace headrace::HEADRACE_NS {

namespace {

// What the passes hand on: convolved [rows, C], rows `stride` apart; of each row and value head decay and beta; of each row and
// key head q . k; out [rows, Hv, V], rows out_stride apart. By channel: decay [rows, Hv, D], and decayed keys of the same shape.
struct Between {
  int64_t stride, out_stride;
  float *convolved, *decay, *beta, *qk, *out, *decayed;
};

void scale(float *x, int64_t width, float factor) {
  for (int64_t i = 0; i < width; i += W) store_up_to(x + i, load_up_to(x + i, width - i) * splat(factor), width - i);
}

// log(1 + e^x), to a few parts in 10^8: log(1 + u) = 2 atanh(u / (2 + u)) for u = e^-|x| in 0 .. 1.
HEADRACE_INLINE vf log_of_1_plus_exp(vf x) {
  const vf u = exp(x < 0.0f ? x : -x), s = u / (u + 2.0f), t = s * s;
  vf sum = splat(1.0f / 15.0f);
  for (const int odd : {13, 11, 9, 7, 5, 3, 1}) sum = madd(sum, t, splat(1.0f / static_cast<float>(odd)));
  return (x > 0.0f ? x : vf{}) + (s + s) * sum;
}

// Of a head: how each channel decays; its key and query [D] that read what is left of a state.
void prepare_channels(const GatedDelta &a, const float *gates, int64_t head, float *q, const float *k, float *decay,
                      float *decayed) {
  const int64_t D = a.key_dim;
  for (int64_t i = 0; i < D; i += W) {
    const int64_t left = D - i;
    const vf gate = load_up_to(gates + i, left) + load_up_to(a.dt_bias + head * D + i, left), rate = splat(a.rate[head]);
    const vf kept = exp(a.bound < 0.0f ? sigmoid_times(splat(a.bound), rate * gate) : -rate * log_of_1_plus_exp(gate));
    store_up_to(decay + i, kept, left);
    store_up_to(decayed + i, load_up_to(k + i, left) * kept, left);
    store_up_to(q + i, load_up_to(q + i, left) * kept, left);
  }
}

// Queries and keys of a row to unit length, and its gates.
void prepare_row(const GatedDelta &a, int64_t row, int64_t at, const Between &b) {
  const int64_t keys = a.key_heads * a.key_dim;
  const float root = 1.0f / __builtin_sqrtf(static_cast<float>(a.key_dim));
  for (int64_t h = 0; h < a.key_heads; ++h) {
    float *const q = b.convolved + at * b.stride + h * a.key_dim, *const k = q + keys;
    scale(q, a.key_dim, root / __builtin_sqrtf(sum_of_products(q, q, a.key_dim) + 1e-6f));
    scale(k, a.key_dim, 1.0f / __builtin_sqrtf(sum_of_products(k, k, a.key_dim) + 1e-6f));
    b.qk[at * a.key_heads + h] = sum_of_products(q, k, a.key_dim);
  }
  const int64_t D = a.key_dim;
  const float *const gates = a.gates + row * a.value_heads * (a.by_channel ? 1 + D : 2);
  for (int64_t h = 0; h < a.value_heads; ++h) {
    b.beta[at * a.value_heads + h] = 1.0f / (1.0f + exp(-gates[h]));
    if (a.by_channel) {
      float *const q = b.convolved + at * b.stride + h * D;
      const int64_t own = (at * a.value_heads + h) * D;
      prepare_channels(a, gates + a.value_heads + h * D, h, q, q + keys, b.decay + own, b.decayed + own);
      continue;
    }
    const float step = log_of_1_plus_exp(gates[a.value_heads + h] + a.dt_bias[h]);
    b.decay[at * a.value_heads + h] = exp(-a.rate[h] * step);
  }
}

// What a token reads of a state S [D, COLUMNS]: k S and q S. Each is summed by CHAINS.
struct Sums {
  vf k[VECTORS], q[VECTORS];
};

// S = decay S + k (x) delta, if there is a token to take in, on its way from `from` to `to`, and meanwhile what the next token, if
// there is one, reads of it. decay: one number, or by channel D of them. ahead: lines that come from memory in the meantime, where
// there is no token to take in.
template <bool BY_CHANNEL, bool UPDATE, bool READ>
HEADRACE_APART void pass(Lines from, Lines to, Lines ahead, int64_t size, const float *decay, const float *k, const vf *delta,
                         const float *next_k, const float *next_q, Sums &sums) {
  vf by_k[CHAINS][VECTORS] = {}, by_q[CHAINS][VECTORS] = {}, new_values[VECTORS];
  if constexpr (UPDATE) HEADRACE_EACH(c, VECTORS, new_values[c] = delta[c]);
  const auto take = [&](int64_t i, auto chain) HEADRACE_ALWAYS_INLINE {
    if constexpr (!UPDATE) fetch_lines<COLUMNS * sizeof(float) / LINE_BYTES, TO_L2>(ahead[i]);
    HEADRACE_EACH(c, VECTORS, {
      vf s = load(from[i] + c * W);
      if constexpr (UPDATE) {
        s = madd(splat(k[i]), new_values[c], s * splat(decay[BY_CHANNEL ? i : 0]));
        store(to[i] + c * W, s);
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

// Columns of the state of one value head through a piece: in memory of their own but for the first reading and the last writing,
// or where they are less than COLUMNS. ahead: as of `pass`, or none.
template <bool BY_CHANNEL>
void recur(const GatedDelta &a, const Piece &piece, int64_t head, int64_t column, const Between &b, const float *ahead) {
  const int64_t D = a.key_dim, V = a.value_dim, Hv = a.value_heads, end = piece.at + piece.count;
  const int64_t key_head = head / (Hv / a.key_heads), keys = a.key_heads * D;
  const int64_t width = V - column < COLUMNS ? V - column : COLUMNS;
  alignas(64) float memory[GatedDelta::MOST_KEY_DIM * COLUMNS];
  const Lines state = {memory, COLUMNS}, target = {a.matrix(piece.to, head) + column, V};
  Lines from = state;
  if (piece.from < 0) memset(memory, 0, D * COLUMNS * sizeof(float));
  else from = {a.matrix(piece.from, head) + column, V};
  if (width < COLUMNS && piece.from >= 0) {
    take_columns(from, D, width, state);
    from = state;
  }
  const float *q = b.convolved + piece.at * b.stride + key_head * D;
  // By channel what reads a state has decayed with it.
  const auto reads = [&](int64_t t, const float *own) { return BY_CHANNEL ? b.decayed + (t * Hv + head) * D : own + keys; };
  Sums sums;
  const Lines coming = ahead ? Lines{const_cast<float *>(ahead), V} : from;
  pass<BY_CHANNEL, false, true>(from, from, coming, D, nullptr, nullptr, nullptr, reads(piece.at, q), q, sums);
  for (int64_t t = piece.at; t < end; ++t, q += b.stride, from = state) {
    const float *const decays = b.decay + (t * Hv + head) * (BY_CHANNEL ? D : 1);
    const float decay = BY_CHANNEL ? 1.0f : *decays;
    const float beta = b.beta[t * Hv + head], qk = b.qk[t * a.key_heads + key_head];
    const float *const v = b.convolved + t * b.stride + 2 * keys + head * V + column;
    float *const out = b.out + t * b.out_stride + head * V + column;
    vf delta[VECTORS];
    HEADRACE_EACH(c, VECTORS, {
      delta[c] = (load_some(v + c * W, width - c * W) - sums.k[c] * splat(decay)) * splat(beta);
      store_some(out + c * W, madd(splat(qk), delta[c], sums.q[c] * splat(decay)), width - c * W);
    });
    const float *const k = q + keys, *const next = q + b.stride;
    if (t + 1 < end) pass<BY_CHANNEL, true, true>(from, state, from, D, decays, k, delta, reads(t + 1, next), next, sums);
    else
      pass<BY_CHANNEL, true, false>(from, width < COLUMNS ? state : target, from, D, decays, k, delta, nullptr, nullptr, sums);
  }
  if (width < COLUMNS) leave_columns(state, D, width, target);
}

// RMS norm of each value head, times silu of its gate, or its sigmoid by channel.
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
      store_up_to(out + h * V + i, a.by_channel ? sigmoid_times(y, gate) : y * sigmoid_times(gate, gate), V - i);
    }
  }
}

template <typename T> void run_group(const GatedDelta &a, const Piece *pieces, int64_t count, int64_t rows) {
  const int64_t Hv = a.value_heads, V = a.value_dim, stride = apart(a.channels()), out_stride = apart(Hv * V);
  const int64_t decays = rows * Hv * (a.by_channel ? a.key_dim : 1), keys = a.by_channel ? decays : 0;
  Scratch scratch = arena(room<float>(rows * stride) + room<float>(decays) + room<float>(rows * Hv) +
                          room<float>(rows * a.key_heads) + room<float>(rows * out_stride) + room<float>(keys));
  float *const convolved = scratch.take<float>(rows * stride), *const out = scratch.take<float>(rows * out_stride);
  float *const decay = scratch.take<float>(decays), *const beta = scratch.take<float>(rows * Hv);
  float *const qk = scratch.take<float>(rows * a.key_heads);
  const Between b = {stride, out_stride, convolved, decay, beta, qk, out, scratch.take<float>(keys)};
  const int threads = rows < FEW ? 1 : a.threads;
  convolve<T>({a.mixed, a.mixed_stride, a.channels(), a.kernel, a.conv, nullptr, a.last, convolved, stride}, pieces, count,
              threads);
  share_rows(pieces, count, rows, threads, [&](int64_t row, int64_t at) { prepare_row(a, row, at, b); });
  share_columns(Hv, V, a.threads, [&](int64_t head, int64_t first, int64_t end) {
    each_block(a, pieces, count, head, first, end, [&](const Piece &piece, int64_t column, const float *ahead) {
      if (a.by_channel) recur<true>(a, piece, head, column, b, ahead);
      else recur<false>(a, piece, head, column, b, ahead);
    });
  });
  share_rows(pieces, count, rows, threads, [&](int64_t row, int64_t at) { write_gated<T>(a, row, b.out + at * out_stride); });
}

}  // namespace

template <typename T> void gated_delta(const GatedDelta &a) {
  each_group(a.segments, a.segment_count,
             [&](const Piece *pieces, int64_t count, int64_t rows) { run_group<T>(a, pieces, count, rows); });
}

HEADRACE_BOTH_TYPES(gated_delta, GatedDelta)

}  // namespace headrace::HEADRACE_NS
