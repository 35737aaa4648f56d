// Attention of lanes over one chunk whose keys and values are bf16 pairs, for AVX-512 BF16: the softmax of running.h between
// products of pairs. A chunk's products are summed up by themselves, then added to the block's sums: to begin with these would
// keep the multipliers waiting for sixteen loads in one go.
//
// K [D/2][64][2] and V [32][D][2]: the two halves of a pair lie together, so that one instruction multiplies and adds both
// for 16 keys or 16 output elements. D is a multiple of 16.
#pragma once

#include "attention/policy.h"
#include "attention/running.h"

namespace headrace::HEADRACE_NS {

constexpr bool is_vnni(int64_t dim) {
#ifdef __AVX512BF16__
  return dim % 16 == 0;
#else
  return dim < 0;
#endif
}

#ifdef __AVX512BF16__

struct Vnni {
  static constexpr bool RUNNING = true;  // sums run on from chunk to chunk
  static constexpr bool PAIRS = true;
  static constexpr int BATCH = 1, TOGETHER = LANES, GROUP = LANES;
  static constexpr int64_t SOON = 2048;  // elements that a stream fetches ahead
  static constexpr int HALF = CHUNK / 2;
  using Type = bf16;
  using Space = ChunkSpace<bf16>;
  using Query = bf16;
  using Probability = bf16;
  template <bool FLUSH> using Tiny = headrace::HEADRACE_NS::Tiny<FLUSH>;
  const bf16 *k, *v, *stored;  // see ChunkOf
  int64_t dim;
  int64_t ahead;                        // elements from these keys to those that are read next; 0: none
  int64_t lanes;                        // that meet the chunk; 0: nothing is to be fetched meanwhile
  int keys = CHUNK, next_keys = CHUNK;  // that somebody sees, of these and of those

  static int64_t scratch(int64_t) { return 0; }
  static void query(const bf16 *from, bf16 *to, int64_t n) { memcpy(to, from, n * sizeof(bf16)); }

  Vnni(const ChunkOf<bf16> &chunk, int64_t dim, int64_t, const Visit &visit, const Space &)
      : k(chunk.k), v(chunk.v), stored(chunk.stored), dim(dim), ahead(visit.ahead), lanes(visit.lanes), keys(visit.keys),
        next_keys(visit.next_keys) {}

  // Keys and values that lie in a cache already.
  Vnni(const bf16 *k, const bf16 *v, int64_t dim) : k(k), v(v), stored(k), dim(dim), ahead(0), lanes(0) {}

  // One group of lanes reads K, then V, and L1 holds little more than both: fetch half a chunk ahead. Several groups read
  // them in turn: fetch a whole chunk ahead.
  bool one_group() const { return lanes <= LANES; }
  const bf16 *during_scores() const { return one_group() ? v : ahead ? stored + ahead : nullptr; }
  const bf16 *during_values() const { return !ahead ? nullptr : one_group() ? stored + ahead : v + ahead; }

  // Few lanes wait for memory, which answers soonest when it is asked in the order in which things lie: two rows go together
  // through whole rows of values, as fast as four through half of them. More lanes would read the values too often.
  Tiling value_tiling(int64_t n) const {
    return lanes > 0 && lanes <= 2 * TILE_ROWS && dim % 128 == 0 ? Tiling(n, static_cast<int>(n + 1) / 2) : Tiling(n);
  }

  // Where L1 is small, one or two lanes fetch what they read a little later themselves: so close behind, the processor's own
  // fetching helps. Only if what is read then lies behind these keys and values, as it does but for the last head of a unit.
  bool streams() const { return small_l1 && lanes > 0 && lanes <= 2 && ahead == CHUNK * dim && stored == k; }

  // That, for C columns from `here` on of rows that are `stride` elements apart.
  static Ahead later(const bf16 *here, int64_t stride, int columns) {
    const int64_t rows = SOON > stride ? SOON / stride : 1;
    return {here + rows * stride, stride, columns};
  }

  // What one group of lanes fetches are these values, of which the pairs behind the last key are left out.
  Ahead fetched_by_scores(int64_t before, int tile) const {
    const int pairs = one_group() ? (keys + 1) / 2 : CHUNK / 2;
    return streams() ? later(k, 2 * CHUNK, 4) : share(during_scores(), before, tile, tiles_of(lanes % LANES), 0, 4, pairs);
  }

  // Of the next keys the second half is left out, if nobody sees it and a step fetches one row of them: so do up to six lanes
  // with heads of 64, three or four with heads of 128.
  Ahead fetched_by_values(int64_t before, int tile, int64_t d, int columns) const {
    if (streams()) return later(v + 2 * d, 2 * dim, columns);
    Ahead all = share(during_values(), before, tile, value_tiling(lanes % LANES).tiles, d, columns, CHUNK / 2);
    if (next_keys <= HALF && one_group() && all.stride == 2 * CHUNK) all.lines /= 2;
    return all;
  }

  // The part of `next`, so many of its 32 `pairs`, that a tile fetches while it takes 16 `columns` columns a step, from column
  // d on: the `tile`-th behind `before` lanes in whole groups. The last group, if it is not whole, has `last` tiles.
  Ahead share(const bf16 *next, int64_t before, int tile, int last, int64_t d, int columns, int pairs) const {
    if (!next || lanes == 0) return {k, 0, 0};
    const int64_t turn = before / LANES * tiles_of(LANES) + tile, parts = lanes / LANES * tiles_of(LANES) + last;
    const int64_t stride = (pairs * columns + parts - 1) / parts;
    return {next + (turn * dim + d) * 2 * pairs / parts, stride, static_cast<int>((stride + LINE - 1) / LINE)};
  }

  // Whether R rows that take C columns and fetch LINES lines a step are a single lane, which fetches all: nobody else
  // reads them. (Four lanes gain nothing by it.)
  template <int R, int C, int LINES> static constexpr bool once = R == 1 && LINES == C;

  // p[lane][j] = sum over d of q[lane][d] * k[d][j]
  void scores(int n, const bf16 *q, float *p, int64_t before) const {
    const Tiling tiling(n);
    for (int tile = 0; tile < tiling.tiles; ++tile) {
      const int r = tiling.first(tile);
      score_rows(tiling.first(tile + 1) - r, q + r * dim, fetched_by_scores(before, tile), p + r * CHUNK);
    }
  }

  void score_rows(int n, const bf16 *q, Ahead next, float *p) const {
    keys <= HALF ? score_keys<2>(n, q, next, p) : score_keys<4>(n, q, next, p);
  }

  // Of 16 C keys.
  template <int C> void score_keys(int n, const bf16 *q, Ahead next, float *p) const {
    with_tile_rows(n, [&](auto rows) {
      with_step_lines<rows, 4>(next.lines, [&](auto lines) { this->score_tile<rows, C, lines>(q, next, p); });
    });
  }

  template <int R, int C, int LINES> HEADRACE_APART void score_tile(const bf16 *q, Ahead next, float *p) const {
    __m512 sum[R][C];
    clear(sum);
    const auto keep = [&](auto r) HEADRACE_ALWAYS_INLINE { store_scores(sum[r], p + r * CHUNK); };
    finished_steps<R, C, LINES, once<R, 4, LINES>>(q, dim, k, 2 * CHUNK, dim / 2, next, sum, keep);
  }

  template <int C> static HEADRACE_ALWAYS_INLINE void store_scores(const __m512 (&sum)[C], float *p) {
    HEADRACE_EACH(c, C, _mm512_store_ps(p + c * 16, sum[c]));
  }

  // A score in the unit of m.
  static float unit(float score) { return score * LOG2_E; }

  // Weights of a merge: 0 for what was EMPTY.
  static vf power(vf x) { return x == splat(-__builtin_inff()) ? vf{} : (vf)exp2((__m512)x); }

  // Scores s [n, 64] -> probabilities p [n, 64], as running.h says; which lanes' sums are to be multiplied by keep [n].
  uint32_t probabilities(int n, float *s, const Seen &seen, float scale, bf16 *p, float *m, float *l, float *keep,
                         const Fetch &fetch, const float *weights = nullptr) const {
    return RunningSoftmax{_mm512_set1_ps(scale * LOG2_E), s, seen, p, m, l, keep, weights, fetch}.run(n);
  }

  // Probabilities p [lanes, 64] that meet the values at once.
  struct Waiting {
    const bf16 *p;
    Seen seen;
    int chunks = 0, lanes = 0;
    int64_t before;
  };

  // Products fetch all there is to fetch.
  Fetch fetch(int64_t, const bf16 *) const { return {k, {k, k}, 0, 0, false}; }

  void add_to(Waiting &waiting, const bf16 *p, const Seen &seen, int64_t index) const {
    waiting.p = p, waiting.seen = seen, waiting.before = index * GROUP, waiting.chunks = 1;
  }

  static bool masks(const Waiting &) { return false; }

  // acc[lane] += sum over visible keys of p[lane][j] * v[j], of the lanes that wait, if any
  void values(const Waiting *all, int, float *acc) const {
    const Tiling tiling = value_tiling(all->lanes);
    for (int tile = 0; tile < tiling.tiles && all->chunks; ++tile) {
      const int r = tiling.first(tile), rows = tiling.first(tile + 1) - r;
      const uint64_t these = all->seen.union_of(r, rows);
      if (!these) continue;
      const bf16 *p = all->p + r * CHUNK;
      with_tile_rows(rows, [&](auto count) { this->value_columns<count>(p, these, all->before, tile, acc + r * dim); });
    }
  }

  // these: keys that some of the R lanes sees, as bits; before, tile: see share.
  template <int R>
  void value_columns(const bf16 *p, uint64_t these, int64_t before, int tile, float *acc) const {
    int64_t d = 0;
    auto columns = [&](auto c) {  // as many 16 C columns as there are
      for (; d + 16 * c <= dim; d += 16 * c) {
        const Ahead next = fetched_by_values(before, tile, d, c);
        if (these != ~0ull) edge_tile<R, c>(p, these, next, d, acc);
        else with_step_lines<R, c>(next.lines, [&](auto lines) { value_tile<R, c, lines>(p, next, d, acc); });
      }
    };
    if constexpr (R <= 2) columns(Constant<8>{});  // few rows need more columns to keep the multipliers busy
    columns(Constant<4>{});
    columns(Constant<2>{});
    columns(Constant<1>{});
  }

  // Output elements d .. d + 16 C - 1.
  template <int R, int C, int LINES>
  HEADRACE_APART void value_tile(const bf16 *p, Ahead next, int64_t d, float *acc) const {
    __m512 sum[R][C];
    clear(sum);
    const auto add = [&](auto r) HEADRACE_ALWAYS_INLINE { add_values(sum[r], acc + r * dim + d); };
    finished_steps<R, C, LINES, once<R, C, LINES>>(p, CHUNK, v + 2 * d, 2 * dim, CHUNK / 2, next, sum, add);
  }

  // The same at the edge of what lanes see. A key that no lane sees is left out or, in a pair with one that is seen, masked:
  // its value may be garbage, and 0 times NaN is NaN. Leaving out a probability of 0 changes no bit. What steps that are left
  // out would have fetched is fetched at once.
  template <int R, int C>
  HEADRACE_APART void edge_tile(const bf16 *p, uint64_t these, Ahead next, int64_t d, float *acc) const {
    __m512 sum[R][C];
    clear(sum);
    const bf16 *from = v + 2 * d;
    const int whole = __builtin_ctzll(~these) / 2;  // pairs, from the first on
    for (int pair = 0; pair < CHUNK / 2; ++pair) {
      fetch_near<SOME>(next.from + pair * next.stride, next.lines);
      const int halves = pair < whole ? 3 : these >> (2 * pair) & 3;
      if (halves) pair_step<R, C>(p + 2 * pair, CHUNK, from + pair * 2 * dim, half_mask(halves), sum);
    }
    HEADRACE_EACH(r, R, add_values(sum[r], acc + r * dim + d));
  }

  template <int C> static HEADRACE_ALWAYS_INLINE void add_values(const __m512 (&sum)[C], float *acc) {
    HEADRACE_EACH(c, C, { _mm512_store_ps(acc + c * 16, _mm512_add_ps(_mm512_load_ps(acc + c * 16), sum[c])); });
  }

  static __m512i half_mask(int halves) { return _mm512_set1_epi32((halves & 1 ? 0xffff : 0) | (halves & 2 ? 0xffff0000 : 0)); }
};

static_assert(RunningPolicy<Vnni>);

#endif

}  // namespace headrace::HEADRACE_NS
