// Attention of lanes over one chunk with keys as [D][64] and values as [64][D], in fp32 multiply-adds: every instruction
// set and type. Each sum is a chain in ascending order, whatever the tile, so a lane's bits do not depend on its
// neighbours. Numbers are widened as they are read: a copy in fp32 would not stay in L1. P: D rounded up to 16.
#pragma once

#include "attention/policy.h"
#include "isa/rows.h"

namespace headrace::HEADRACE_NS {

// s[lane][j] = sum over d of q[lane][d] * k[d][j], of R lanes and C W keys; keys are `stride` apart from d to d + 1.
template <int R, int C, int BYTES, typename S>
HEADRACE_APART void score_tile(const float *q, int64_t dim, const S *keys, int64_t stride, Coming next, bool near, float *s) {
  vf sum[R][C];
  zero(sum);
  add_products<1, BYTES>(
      q, dim, 0, dim,
      [&](int64_t d, auto, int at, auto &key) HEADRACE_ALWAYS_INLINE { load_columns(keys + d * stride + at, key); }, next, near,
      sum);
  HEADRACE_EACH(r, R, {
    order_columns<S>(sum[r]);
    HEADRACE_EACH(c, C, store(s + r * CHUNK + c * W, sum[r][c]));
  });
}

// Keys that some lanes see: one of them or more first .. last - 1, all of them begin .. end - 1.
struct Common {
  int first = 0, begin = 0, end = CHUNK, last = CHUNK;

  Common(const Seen &seen, int lane, int lanes) {
    if (seen.everything) return;
    first = CHUNK, last = 0;
    for (int r = lane; r < lane + lanes; ++r) {
      first = seen.low[r] < first ? seen.low[r] : first;
      last = seen.high[r] > last ? seen.high[r] : last;
      begin = seen.low[r] > begin ? seen.low[r] : begin;
      end = seen.high[r] < end ? seen.high[r] : end;
    }
    if (begin >= end) begin = end = last;
  }

  bool same() const { return first == begin && end == last; }
};

// acc[lane] = acc[lane] * keep + take * (sum over visible keys of p[lane][j] * v[j]), of R lanes from `lane` on and C W
// elements. Keys that a lane does not see are left out, not multiplied by 0: their values may be garbage. APART: lanes may
// see different keys.
template <int R, int C, int BYTES, bool APART, typename S>
HEADRACE_APART void value_tile(const float *p, const S *values, int64_t stride, const Seen &seen, int lane, Coming next,
                               bool near, float *acc, int64_t acc_stride, const Weights &w) {
  vf sum[R][C];
  zero(sum);
  const auto load_values = [&](int64_t j, auto, int at, auto &value)
                               HEADRACE_ALWAYS_INLINE { load_columns(values + j * stride + at, value); };
  const auto add_visible = [&](int from, int to) HEADRACE_ALWAYS_INLINE {
    for (int j = from; j < to; ++j) {
      vf value[C];
      load_values(j, Constant<0>{}, 0, value);
      HEADRACE_EACH(r, R, {
        if (seen.low[lane + r] <= j && j < seen.high[lane + r])
          HEADRACE_EACH(c, C, sum[r][c] = madd(splat(p[r * CHUNK + j]), value[c], sum[r][c]));
      });
    }
  };
  const Common keys(seen, lane, R);
  if constexpr (APART) add_visible(keys.first, keys.begin);
  add_products<1, BYTES>(p, CHUNK, keys.begin, keys.end, load_values, next, near, sum);
  if constexpr (APART) add_visible(keys.end, keys.last);
  HEADRACE_EACH(r, R, {
    order_columns<S>(sum[r]);
    const vf keep = splat(w.keep[lane + r]), take = splat(w.take[lane + r]);
    HEADRACE_EACH(c, C, {
      float *at = acc + r * acc_stride + c * W;
      store(at, madd(sum[r][c], take, load(at) * keep));
    });
  });
}

// T: type of queries and results; S: of what is stored.
template <typename T, typename S = T> struct Plain {
  static constexpr bool RUNNING = false, PAIRS = false;
  static constexpr int BATCH = 1, TOGETHER = LANES;
  using Type = T;
  using Space = ChunkSpace<float>;
  using Query = float;
  using Probability = float;
  template <bool> struct Tiny {};  // the caller's mode: exp makes no results below 1e-38, for which time would be lost

  const S *k, *v, *stored;  // see ChunkOf
  int64_t dim, padded;
  int64_t ahead;                  // elements from these keys to those that are read next; 0: none
  int64_t lanes;                  // that meet the chunk
  const float *wide_v = nullptr;  // [64][P] where D is no multiple of 16

  static int64_t scratch(int64_t dim) { return dim % 16 == 0 ? 0 : CHUNK * ((dim + 15) / 16 * 16); }

  static void query(const T *from, float *to, int64_t n) { widen(from, to, n); }

  Plain(const ChunkOf<S> &chunk, int64_t dim, int64_t padded, const Visit &visit, const Space &space)
      : k(chunk.k), v(chunk.v), stored(chunk.stored), dim(dim), padded(padded), ahead(visit.ahead), lanes(visit.lanes) {
    if (dim == padded) return;
    for (int64_t j = 0; j < CHUNK; ++j) {
      for (int64_t d = dim; d < padded; ++d) space.scratch[j * padded + d] = 0.0f;
      widen(v + j * dim, space.scratch + j * padded, dim);
    }
    wide_v = space.scratch;
  }

  // Keys that lie in a cache already, for scores alone.
  Plain(const S *k, int64_t dim) : k(k), v(nullptr), stored(k), dim(dim), padded(dim), ahead(0), lanes(1) {}

  // Lanes read K, then V, and L1 holds little more than both: what is fetched meanwhile lies half a chunk ahead. Several
  // groups of lanes read them in turn: a whole chunk ahead.
  bool one_group() const { return lanes <= LANES; }
  const S *during_scores() const { return one_group() ? v : ahead ? stored + ahead : nullptr; }
  const S *during_values() const { return !ahead ? nullptr : one_group() ? stored + ahead : v + ahead; }

  // The part of `next` that `rows` lanes from `lane` on fetch, taking `columns` vectors in each step, behind `done` elements.
  Coming share(const S *next, int64_t lane, int rows, int64_t done, int columns) const {
    if (!next) return {reinterpret_cast<const char *>(k), 0};
    const int all = static_cast<int>(lanes), before = static_cast<int>(lane * dim * CHUNK + rows * done);
    const int stride = columns * W * static_cast<int>(sizeof(S)) * rows;  // int: divisions of 64 bits take long
    return {reinterpret_cast<const char *>(next + before / all), stride / all};
  }

  static constexpr int bytes(int columns) { return columns * W * sizeof(S); }

  // f(first lane, lanes) for n lanes, by tiles that fill the registers.
  template <typename F> static void by_tiles(int n, F f) { by_rows<6, 4, 2, 1>(n, f); }

  // Whether a tile of R lanes fetches to L1, otherwise to L2, for L1 is full. Fewer than six lanes with AVX-512 are so fast
  // that it matters how far away memory is. On Cascade Lake, that is: Zen 4, whose L1 is as small, is faster by way of L2.
  template <int R> static bool near() { return W == 16 && R < 6 && !(small_l1 && multiplies_bf16); }

  // Vectors side by side: few rows need more of them, so that enough chains are under way.
  static constexpr int wide(int rows) { return W == 16 ? (rows <= 2 ? 8 : 4) : rows == 6 ? 2 : 8 / rows; }

  // s[lane][j] = sum over d of q[lane][d] * k[d][j]; `before` lanes have met the chunk already.
  void scores(int n, const float *q, float *s, int64_t before) const {
    by_tiles(n, [&](int r, auto rows) {
      constexpr int C = wide(rows) * W < CHUNK ? wide(rows) : CHUNK / W;
      for (int j = 0; j < CHUNK; j += C * W)
        score_tile<rows, C, bytes(C)>(q + r * dim, dim, k + j, CHUNK, share(during_scores(), before + r, rows, j * dim, C),
                                      near<rows>(), s + r * CHUNK + j);
    });
  }

  static vf power(vf x) { return exp(x); }
  static float unit(float score) { return score; }

  // Raw scores s [n, 64] -> probabilities p [n, 64] relative to each lane's own maximum m, rounded as T is, 0 where the
  // lane sees nothing; l [n] is the sum of the unrounded ones, 0 when no visible score is above -inf. `weights` [64] is
  // what the probabilities are multiplied by before they are rounded, but not in the sum.
  static void probabilities(int n, float *s, const Seen &seen, float scale, float *p, float *m, float *l,
                            const float *weights = nullptr) {
    constexpr int N = CHUNK / W;
    const auto scaled = [&](int r, vf(&x)[N]) HEADRACE_ALWAYS_INLINE {
      each<N>([&](auto c) HEADRACE_ALWAYS_INLINE { x[c] = load(s + r * CHUNK + c * W) * splat(scale); });
      if (!seen.everything) hide(seen.low[r], seen.high[r], x);
    };
    // Three loops: what follows one after the other in a lane would keep the processor waiting.
    for (int r = 0; r < n; ++r) {
      vf x[N];
      scaled(r, x);
      m[r] = greatest(x);
    }
    for (int r = 0; r < n; ++r) {
      vf x[N];
      scaled(r, x);
      each<N>([&](auto c) HEADRACE_ALWAYS_INLINE { x[c] = x[c] - splat(m[r]); });
      each<N / 4>([&](auto c) HEADRACE_ALWAYS_INLINE { exp(reinterpret_cast<vf(&)[4]>(x[4 * c])); });
      each<N>([&](auto c) HEADRACE_ALWAYS_INLINE {
        store(s + r * CHUNK + c * W, x[c]);
        const vf weighed = weights ? x[c] * load(weights + c * W) : x[c];
        store(p + r * CHUNK + c * W, round_as(static_cast<const T *>(nullptr), weighed));
      });
    }
    for (int r = 0; r < n; ++r) l[r] = sum64(s + r * CHUNK);
  }

  // The greatest score, 0 where all are -inf.
  template <int N> HEADRACE_INLINE float greatest(const vf (&x)[N]) {
    const float low = -__builtin_inff();
    vf top = splat(low);
    each<N>([&](auto c) HEADRACE_ALWAYS_INLINE { top = max(top, x[c]); });
    const float most = HEADRACE_NS::greatest(top);
    return most == low ? 0.0f : most;
  }

  // -inf in place of the scores of keys other than first .. last - 1.
  template <int N> static void hide(int first, int last, vf (&x)[N]) {
    each<N>([&](auto c) HEADRACE_ALWAYS_INLINE {
      vi index;
      for (int i = 0; i < W; ++i) index[i] = c * W + i;
      x[c] = ((index >= first) & (index < last)) ? x[c] : splat(-__builtin_inff());
    });
  }

  // acc[lane] = acc[lane] * keep + take * (sum over visible keys of p[lane][j] * v[j]).
  void values(int n, const float *p, const Seen &seen, float *acc, const Weights &w, int64_t before) const {
    by_tiles(n, [&](int r, auto rows) {
      if (rows == 6 || Common(seen, r, rows).same()) value_rows<rows>(p, seen, r, acc, w, before);
      else
        for (int i = r; i < r + rows; ++i) value_rows<1>(p, seen, i, acc, w, before);
    });
  }

  template <int R>
  void value_rows(const float *p, const Seen &seen, int lane, float *acc, const Weights &w, int64_t before) const {
    int64_t d = 0;
    auto columns = [&](auto c) {  // as many c W columns as there are
      for (; d + c * W <= padded; d += c * W) {
        const Coming next = share(during_values(), before + lane, R, CHUNK * d, c);
        const auto tile = [&](auto *from, int64_t stride) {
          value_tile<R, c, bytes(c), R == 6>(p + lane * CHUNK, from + d, stride, seen, lane, next, near<R>(),
                                             acc + lane * padded + d, padded, w);
        };
        wide_v ? tile(wide_v, padded) : tile(v, dim);
      }
    };
    if constexpr (wide(R) >= 8) columns(Constant<8>{});
    if constexpr (wide(R) >= 4) columns(Constant<4>{});
    columns(Constant<2>{});
    if constexpr (W == 16) columns(Constant<1>{});
  }
};

static_assert(ChunkPolicy<Plain<bf16>> && ChunkPolicy<Plain<float>>);

}  // namespace headrace::HEADRACE_NS
