// What recurrent layers with states of value heads have in common: the rows of a step in groups, a causal convolution with silu,
// and columns of states. In fp32.
//
// K: inputs of the convolution; C: channels; D: rows of a state; V: its columns. Segments go one after another in each channel,
// and in each column of the states, so that one may begin with the state that another has left.
#pragma once

#include "common/arena.h"
#include "common/shares.h"
#include "isa/fetch.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

// The rows of a group that one segment has. Scratch has them from `at` on.
struct Piece {
  int64_t row, count, at, from, to;
};

namespace {

constexpr int64_t TOGETHER = 64;  // rows that go through all passes together: their scratch stays in the caches
constexpr int64_t PART = 16;      // of them that a thread takes at once
constexpr int64_t CHANNELS = 64;  // of a task of the convolution
constexpr int COLUMNS = 32;       // of a state: 256 rows of them fit into L1
constexpr int VECTORS = COLUMNS / W, CHAINS = VECTORS < 4 ? 4 / VECTORS : 1;
constexpr int64_t FEW = 8;  // rows below which waking the other threads costs more than it saves, but for the recurrence

// How far apart rows of scratch lie. Rows that were a power of two apart would evict each other.
constexpr int64_t apart(int64_t width) { return (width + 15) / 16 * 16 + 16; }

// As load_up_to and store_up_to, where n may be 0 or less.
template <typename T> HEADRACE_INLINE vf load_some(const T *p, int64_t n) { return n > 0 ? load_up_to(p, n) : vf{}; }
template <typename T> HEADRACE_INLINE void store_some(T *p, vf x, int64_t n) {
  if (n > 0) store_up_to(p, x, n);
}

// Sum of squares in 64 lanes, as in norms.cpp.
inline float sum_of_products(const float *x, const float *y, int64_t width) {
  alignas(64) float sums[CHUNK] = {};
  for (int64_t i = 0; i < width; i += CHUNK)
    for (int64_t c = 0; c < CHUNK && i + c < width; c += W) {
      const int64_t n = width - i - c;
      store(sums + c, madd(load_up_to(x + i + c, n), load_up_to(y + i + c, n), load(sums + c)));
    }
  return sum64(sums);
}

inline float log_of_1_plus_exp(float x) { return x > 20.0f ? x : __builtin_log1pf(exp(x)); }

// A causal convolution of each channel of rows [T, C], `stride` apart, and silu of that. The inputs that the next row will see are
// kept in `last` [slots, K - 1, C].
struct Convolution {
  static constexpr int64_t MOST_INPUTS = 8;

  const void *rows;
  int64_t stride, channels, kernel;
  const float *filter, *bias;  // [K, C]; [C], or null
  void *last;
  float *out;  // rows of scratch, out_stride apart
  int64_t out_stride;
};

// VECTORS of channels from `channel` on, of which `width` count, through all pieces. INPUTS: those that a row sees, 0 for any number
// of them.
template <typename T, int INPUTS, int VECTORS>
void convolve(const Convolution &a, const Piece *pieces, int64_t count, int64_t channel, int64_t width) {
  const int64_t channels = a.channels, inputs = INPUTS ? INPUTS : a.kernel, before = inputs - 1;
  T *const last = static_cast<T *>(a.last) + channel;
  vf weights[Convolution::MOST_INPUTS][VECTORS], seen[Convolution::MOST_INPUTS][VECTORS], begin[VECTORS];
  const auto left = [&](int c) HEADRACE_ALWAYS_INLINE { return width - c * W; };
  for (int64_t j = 0; j < inputs; ++j)
    HEADRACE_EACH(c, VECTORS, weights[j][c] = load_some(a.filter + j * channels + channel + c * W, left(c)));
  HEADRACE_EACH(c, VECTORS, begin[c] = a.bias ? load_some(a.bias + channel + c * W, left(c)) : vf{});
  for (const Piece *piece = pieces; piece < pieces + count; ++piece) {
    const T *row = static_cast<const T *>(a.rows) + piece->row * a.stride + channel;
    float *to = a.out + piece->at * a.out_stride + channel;
    for (int64_t j = 0; j < before; ++j)
      HEADRACE_EACH(c, VECTORS, {
        seen[j][c] = piece->from < 0 ? vf{} : load_some(last + (piece->from * before + j) * channels + c * W, left(c));
      });
    for (int64_t t = 0; t < piece->count; ++t, row += a.stride, to += a.out_stride)
      HEADRACE_EACH(c, VECTORS, {
        vf y = begin[c];
        seen[before][c] = load_some(row + c * W, left(c));
        for (int64_t j = 0; j < inputs; ++j) y = madd(weights[j][c], seen[j][c], y);
        for (int64_t j = 0; j < before; ++j) seen[j][c] = seen[j + 1][c];
        store_some(to + c * W, sigmoid_times(y, y), left(c));
      });
    for (int64_t j = 0; j < before; ++j)
      HEADRACE_EACH(c, VECTORS, store_some(last + (piece->to * before + j) * channels + c * W, seen[j][c], left(c)));
  }
}

// All channels, shared out.
template <typename T> void convolve(const Convolution &a, const Piece *pieces, int64_t count, int threads) {
  constexpr int TWO = 2;  // of each row they are a cache line of bf16
  share_each((a.channels + CHANNELS - 1) / CHANNELS, threads, [&](int64_t task) {
    const int64_t end = (task + 1) * CHANNELS < a.channels ? (task + 1) * CHANNELS : a.channels;
    for (int64_t channel = task * CHANNELS; channel < end; channel += TWO * W) {
      const int64_t width = end - channel;
      if (a.kernel == 4) convolve<T, 4, TWO>(a, pieces, count, channel, width);
      else convolve<T, 0, TWO>(a, pieces, count, channel, width);
    }
  });
}

// COLUMNS of a state, one line for each row of it.
struct Lines {
  float *at;
  int64_t stride;

  float *operator[](int64_t i) const { return at + i * stride; }
};

// The first `width` of COLUMNS, and zeros behind them.
inline void take_columns(Lines from, int64_t size, int64_t width, Lines state) {
  for (int64_t i = 0; i < size; ++i)
    HEADRACE_EACH(c, VECTORS, store(state[i] + c * W, load_some(from[i] + c * W, width - c * W)));
}

inline void leave_columns(Lines state, int64_t size, int64_t width, Lines to) {
  for (int64_t i = 0; i < size; ++i)
    HEADRACE_EACH(c, VECTORS, store_some(to[i] + c * W, load(state[i] + c * W), width - c * W));
}

// f(head, first column, end) for columns of each of `heads` states, shared out. Whole heads read memory in its order; there may be
// too few for all threads.
template <typename F> void share_columns(int64_t heads, int64_t columns, int threads, F f) {
  const int64_t width = heads < 2 * threads ? COLUMNS : columns, parts = (columns + width - 1) / width;
  share_each(heads * parts, threads, [&](int64_t i) {
    const int64_t first = i % parts * width, end = first + width < columns ? first + width : columns;
    f(i / parts, first, end);
  });
}

// recur(piece, column, ahead) for blocks of columns `first` to `end` of one head through all pieces. While one state is computed the
// next one comes from memory: its lines of these columns, `ahead`, since processors do not see on their own that all of it is read
// in the end.
template <typename Layer, typename F>
void each_block(const Layer &a, const Piece *pieces, int64_t count, int64_t head, int64_t first, int64_t end, F recur) {
  for (int64_t i = 0; i < count; ++i) {
    const bool more = i + 1 < count;
    const int64_t slot = pieces[more ? i + 1 : 0].from, from = more ? head : head + 1;
    const float *const ahead = slot < 0 || from == a.value_heads ? nullptr : a.matrix(slot, from);
    for (int64_t column = first; column < end; column += COLUMNS) recur(pieces[i], column, ahead ? ahead + column : nullptr);
  }
}

// f(row, its place in scratch) for each row of a group, shared out.
template <typename F> void share_rows(const Piece *pieces, int64_t count, int64_t rows, int threads, F f) {
  int64_t row_at[TOGETHER];
  for (const Piece *piece = pieces; piece < pieces + count; ++piece)
    for (int64_t t = 0; t < piece->count; ++t) row_at[piece->at + t] = piece->row + t;
  share_out((rows + PART - 1) / PART, threads, [&](int64_t part) {
    for (int64_t at = part * PART; at < rows && at < (part + 1) * PART; ++at) f(row_at[at], at);
  });
}

// run(pieces, their number, their rows) for group after group of the rows of all segments.
template <typename F> void each_group(const StateSegment *segments, int64_t segment_count, F run) {
  Piece pieces[TOGETHER];
  int64_t count = 0, rows = 0;
  const auto finish = [&] {
    if (count) run(pieces, count, rows);
    count = rows = 0;
  };
  for (int64_t n = 0; n < segment_count; ++n) {
    const StateSegment &segment = segments[n];
    int64_t from = segment.from;
    for (int64_t row = segment.row_begin; row < segment.row_end;) {
      if (rows == TOGETHER) finish();
      const int64_t left = segment.row_end - row, length = left < TOGETHER - rows ? left : TOGETHER - rows;
      pieces[count++] = {row, length, rows, from, segment.to};
      rows += length;
      row += length;
      from = segment.to;
    }
  }
  finish();
}

}  // namespace

}  // namespace headrace::HEADRACE_NS
