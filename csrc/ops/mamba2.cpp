// Mamba-2 layers (arXiv 2405.21060), token by token: a causal convolution, a recurrence, a norm behind a gate. In fp32.
//
// T: rows; C: channels, of x, keys and queries (B and C of the paper); Hk: groups of heads that share keys and queries; Hv: heads;
// D: size of keys and queries, V: of a head's x. One order of operations for every cut into segments: a row's bits depend on the
// rows of its own sequence alone.
#include "ops/state_rows.h"

namespace headrace::HEADRACE_NS {

namespace {

// What the passes hand on: convolved [rows, C] = (x, keys, queries), rows `stride` apart; of each row and head decay and step; out
// [rows, Hv, V], rows out_stride apart.
struct MambaPasses {
  int64_t stride, out_stride;
  float *convolved, *decay, *step, *out;
};

void prepare_row(const Mamba2 &a, int64_t row, int64_t at, const MambaPasses &b) {
  const float *const gates = a.gates + row * a.value_heads;
  for (int64_t h = 0; h < a.value_heads; ++h) {
    const float step = log_of_1_plus_exp(gates[h] + a.dt_bias[h]);
    b.step[at * a.value_heads + h] = step;
    b.decay[at * a.value_heads + h] = exp(-a.rate[h] * step);
  }
}

// S = decay S + k (x) taken, on its way from `from` to `to`, and q S of that, summed by CHAINS. ahead: lines that come from memory
// meanwhile, if AHEAD.
template <bool AHEAD>
HEADRACE_APART void pass(Lines from, Lines to, Lines ahead, int64_t size, float decay, const float *k, const float *q,
                         const vf *taken, vf *read) {
  vf sums[CHAINS][VECTORS] = {}, values[VECTORS];
  HEADRACE_EACH(c, VECTORS, values[c] = taken[c]);
  const auto take = [&](int64_t i, auto chain) HEADRACE_ALWAYS_INLINE {
    if constexpr (AHEAD) fetch_lines<COLUMNS * sizeof(float) / LINE_BYTES, TO_L2>(ahead[i]);
    HEADRACE_EACH(c, VECTORS, {
      const vf s = madd(splat(k[i]), values[c], load(from[i] + c * W) * splat(decay));
      store(to[i] + c * W, s);
      sums[chain][c] = madd(splat(q[i]), s, sums[chain][c]);
    });
  };
  int64_t i = 0;
  for (; i + CHAINS <= size; i += CHAINS) HEADRACE_EACH(chain, CHAINS, take(i + chain, Constant<chain>{}));
  for (; i < size; ++i) take(i, Constant<0>{});
  HEADRACE_EACH(c, VECTORS, read[c] = sums[0][c]);
  for (int chain = 1; chain < CHAINS; ++chain)
    for (int c = 0; c < VECTORS; ++c) read[c] = read[c] + sums[chain][c];
}

// Columns of the state of one head through a piece: in memory of their own but for the first reading and the last writing, or
// where they are less than COLUMNS. ahead: as of `pass`, or none.
void recur(const Mamba2 &a, const Piece &piece, int64_t head, int64_t column, const MambaPasses &b, const float *ahead) {
  const int64_t D = a.key_dim, V = a.value_dim, Hv = a.value_heads, end = piece.at + piece.count;
  const int64_t keys = Hv * V + head / (Hv / a.key_heads) * D, queries = keys + a.key_heads * D;
  const int64_t width = V - column < COLUMNS ? V - column : COLUMNS;
  alignas(64) float memory[Mamba2::MOST_KEY_DIM * COLUMNS];
  const Lines state = {memory, COLUMNS}, target = {a.matrix(piece.to, head) + column, V};
  Lines from = state;
  if (piece.from < 0) memset(memory, 0, D * COLUMNS * sizeof(float));
  else from = {a.matrix(piece.from, head) + column, V};
  if (width < COLUMNS && piece.from >= 0) {
    take_columns(from, D, width, state);
    from = state;
  }
  Lines coming = {const_cast<float *>(ahead), V};
  for (int64_t t = piece.at; t < end; ++t, from = state, coming.at = nullptr) {
    const float decay = b.decay[t * Hv + head], step = b.step[t * Hv + head];
    const float *const row = b.convolved + t * b.stride, *const x = row + head * V + column;
    float *const out = b.out + t * b.out_stride + head * V + column;
    const Lines to = t + 1 < end || width < COLUMNS ? state : target;
    vf taken[VECTORS], read[VECTORS];
    HEADRACE_EACH(c, VECTORS, taken[c] = load_some(x + c * W, width - c * W) * splat(step));
    if (coming.at) pass<true>(from, to, coming, D, decay, row + keys, row + queries, taken, read);
    else pass<false>(from, to, from, D, decay, row + keys, row + queries, taken, read);
    HEADRACE_EACH(c, VECTORS, {
      store_some(out + c * W, madd(splat(a.skip[head]), load_some(x + c * W, width - c * W), read[c]), width - c * W);
    });
  }
  if (width < COLUMNS) leave_columns(state, D, width, target);
}

// x of a row, times silu of its gates. -> to, which may be x.
template <typename T, typename Out>
void gate(const Mamba2 &a, int64_t row, const float *x, Out *to, int64_t first, int64_t end) {
  const T *const gates = static_cast<const T *>(a.mixed) + row * a.mixed_stride;
  for (int64_t i = first; i < end; i += W) {
    const vf gate = load_up_to(gates + i, end - i);
    store_up_to(to + i, load_up_to(x + i, end - i) * sigmoid_times(gate, gate), end - i);
  }
}

// Times silu of the gates, then an RMS norm of all heads of each group together, if there is one.
template <typename T> void write_normed(const Mamba2 &a, int64_t row, float *x) {
  const int64_t width = a.value_heads * a.value_dim, group = width / a.key_heads;
  T *const out = static_cast<T *>(a.out) + row * width;
  if (!a.norm && a.rounded) return gate<T>(a, row, x, out, 0, width);
  if (!a.norm) return gate<T>(a, row, x, static_cast<float *>(a.out) + row * width, 0, width);
  for (int64_t first = 0; first < width; first += group) {
    gate<T>(a, row, x, x, first, first + group);
    const float squares = sum_of_products(x + first, x + first, group) / static_cast<float>(group);
    const float factor = 1.0f / __builtin_sqrtf(squares + a.eps);
    for (int64_t i = first; i < first + group; i += W) {
      const int64_t left = first + group - i;
      store_up_to(out + i, load_up_to(x + i, left) * splat(factor) * load_up_to(a.norm + i, left), left);
    }
  }
}

template <typename T> void run_group(const Mamba2 &a, const Piece *pieces, int64_t count, int64_t rows) {
  const int64_t Hv = a.value_heads, V = a.value_dim, stride = apart(a.channels()), out_stride = apart(Hv * V);
  Scratch scratch = arena(room<float>(rows * stride) + 2 * room<float>(rows * Hv) + room<float>(rows * out_stride));
  float *const convolved = scratch.take<float>(rows * stride), *const out = scratch.take<float>(rows * out_stride);
  float *const decay = scratch.take<float>(rows * Hv);
  const MambaPasses b = {stride, out_stride, convolved, decay, scratch.take<float>(rows * Hv), out};
  const int threads = rows < FEW ? 1 : a.threads;
  const T *const channels = static_cast<const T *>(a.mixed) + Hv * V;
  convolve<T>({channels, a.mixed_stride, a.channels(), a.kernel, a.conv, a.conv_bias, a.last, convolved, stride}, pieces, count,
              threads);
  share_rows(pieces, count, rows, threads, [&](int64_t row, int64_t at) { prepare_row(a, row, at, b); });
  share_columns(Hv, V, a.threads, [&](int64_t head, int64_t first, int64_t end) {
    each_block(a, pieces, count, head, first, end,
               [&](const Piece &piece, int64_t column, const float *ahead) { recur(a, piece, head, column, b, ahead); });
  });
  share_rows(pieces, count, rows, threads, [&](int64_t row, int64_t at) { write_normed<T>(a, row, b.out + at * out_stride); });
}

}  // namespace

template <typename T> void mamba2(const Mamba2 &a) {
  each_group(a.segments, a.segment_count,
             [&](const Piece *pieces, int64_t count, int64_t rows) { run_group<T>(a, pieces, count, rows); });
}

HEADRACE_BOTH_TYPES(mamba2, Mamba2)

}  // namespace headrace::HEADRACE_NS
