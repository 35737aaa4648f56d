// Sparse attention by an indexer (DSA; DeepSeek-V3.2, arXiv 2512.02556, section 2.1): scores by which a row chooses keys, and
// what it has chosen side by side. A row's scores are chains of their own, whoever else meets the chunk.
#include <type_traits>

#include "attention/plain.h"
#include "attention/transposed.h"
#include "attention/vnni.h"
#include "common/arena.h"
#include "common/shares.h"

namespace headrace::HEADRACE_NS {

namespace {

template <typename T> bool in_pairs(int64_t dim) { return sizeof(T) == 2 && is_vnni(dim); }

// Number d of token j in a chunk [64, D], or in pairs of tokens.
template <typename S> const S *element(const S *chunk, int64_t dim, int64_t j, int64_t d, bool pairs) {
  return pairs ? chunk + j / 2 * 2 * dim + 2 * d + j % 2 : chunk + j * dim + d;
}

// Keys of a chunk as they are multiplied, in pairs [I/2][64][2] or in fp32 [I][64], and scores of them by heads.
template <typename T> struct ScoredKeys {
  ScoredKeys(Scratch &scratch, int64_t size, bool pairs)
      : size(size), pairs(pairs), keys(scratch.take<float>(CHUNK * size)), wide(scratch.take<float>(LANES * size)),
        scores(scratch.take<float>(LANES * CHUNK)) {}

  static int64_t bytes(int64_t size) {
    return room<float>(CHUNK * size) + room<float>(LANES * size) + room<float>(LANES * CHUNK);
  }

  T *in_pairs() const { return reinterpret_cast<T *>(keys); }

  // f(head, its scores [64]) for heads q [N, I].
  template <typename F> void by_head(const T *q, int64_t heads, F f) const {
    for (int64_t head = 0; head < heads; head += LANES) {
      const int lanes = static_cast<int>(heads - head < LANES ? heads - head : LANES);
      multiply(lanes, q + head * size);
      for (int lane = 0; lane < lanes; ++lane) f(head + lane, scores + lane * CHUNK);
    }
  }

  int64_t size;
  bool pairs;
  float *keys, *wide, *scores;

 private:
  void multiply(int lanes, const T *q) const {
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == 2)
      if (pairs) return Vnni(in_pairs(), in_pairs(), size).scores(lanes, q, scores, 0);
#endif
    widen(q, wide, lanes * size);
    Plain<float>(keys, size).scores(lanes, wide, scores, 0);
  }
};

// Scores of a chunk's keys for one row after another.
template <typename T> class IndexerChunk {
 public:
  static int64_t bytes(const IndexScores &a) { return ScoredKeys<T>::bytes(a.size) + room<float>(CHUNK * a.size); }

  IndexerChunk(const IndexScores &a, Scratch scratch, int64_t slot)
      : a(a), scale(a.v_scale ? a.v_scale + slot * CHUNK : nullptr),
        scored(scratch, a.size, in_pairs<T>(a.dim) && in_pairs<T>(a.size)) {
    const int64_t at = slot * CHUNK * a.dim;
    if (scale) take(static_cast<const int8_t *>(a.v) + at, scratch);
    else take(static_cast<const T *>(a.v) + at, scratch);
  }

  // out [64], of keys key_start .. key_start + 63.
  void of(int64_t row, int64_t key_start, float *out) const {
    vf sum[N] = {};
    scored.by_head(static_cast<const T *>(a.q) + row * a.heads * a.size, a.heads,
                   [&](int64_t head, const float *s) { add(s, a.weights[row * a.heads + head], sum); });
    const int64_t seen = a.positions[row] - key_start + 1;
    each<N>([&](auto c) HEADRACE_ALWAYS_INLINE {
      vi index;
      for (int i = 0; i < W; ++i) index[i] = c * W + i;
      store(out + c * W, index < static_cast<int>(seen < CHUNK ? seen : CHUNK) ? sum[c] : splat(-__builtin_inff()));
    });
  }

 private:
  static constexpr int N = CHUNK / W;

  template <typename S> void take(const S *values, Scratch &scratch) {
    S *turned = scratch.take<S>(CHUNK * a.size);
    if (scored.pairs) {
      if constexpr (sizeof(T) == 2) {
        keys_of_values<true>(values, a.dim, a.size, turned);
        for (int64_t i = 0; i < CHUNK * a.size; ++i) scored.in_pairs()[i] = as_type(turned[i]);
      }
      return;
    }
    const bool stored = in_pairs<T>(a.dim);
    for (int64_t d = 0; d < a.size; ++d)
      for (int64_t j = 0; j < CHUNK; ++j) turned[d * CHUNK + j] = *element(values, a.dim, j, d, stored);
    widen(turned, scored.keys, CHUNK * a.size);
  }

  static bf16 as_type(bf16 x) { return x; }
  static bf16 as_type(int8_t x) {
    const float wide = x;
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    return static_cast<bf16>(bits >> 16);
  }

  void add(const float *s, float weight, vf (&sum)[N]) const {
    each<N>([&](auto c) HEADRACE_ALWAYS_INLINE {
      vf x = load(s + c * W);
      if (scale) x = x * load(scale + c * W);
      sum[c] = madd(splat(weight), x < vf{} ? vf{} : x, sum[c]);  // what is no number stays
    });
  }

  const IndexScores &a;
  const float *scale;
  const ScoredKeys<T> scored;
};

// Scores of a chunk's pools of keys for one row after another.
template <typename T> class PooledChunk {
 public:
  static int64_t bytes(const IndexScores &a) { return room<float>(CHUNK / a.pool * a.size); }

  PooledChunk(const IndexScores &a, Scratch scratch, int64_t slot)
      : a(a), pools(CHUNK / a.pool), keys(scratch.take<float>(pools * a.size)) {
    const int64_t at = slot * CHUNK * a.dim;
    const float *scale = a.v_scale ? a.v_scale + slot * CHUNK : nullptr;
    for (int64_t p = 0; p < pools; ++p)
      for (int64_t d = 0; d < a.size; d += W)
        if (scale) take(static_cast<const int8_t *>(a.v) + at, scale, p, d);
        else take(static_cast<const T *>(a.v) + at, scale, p, d);
  }

  // out [64 / pool], of keys key_start .. key_start + 63.
  void of(int64_t row, int64_t key_start, float *out) const {
    const T *q = static_cast<const T *>(a.q) + row * a.heads * a.size;
    const int64_t seen = (a.positions[row] + 1 - key_start) / a.pool;
    for (int64_t p = 0; p < pools; ++p) {
      if (p >= seen) {
        out[p] = -__builtin_inff();
        continue;
      }
      float sum = 0.0f;
      for (int64_t head = 0; head < a.heads; ++head) {
        const float x = product(q + head * a.size, keys + p * a.size);
        sum = __builtin_fmaf(a.weights[row * a.heads + head], x < 0.0f ? 0.0f : x, sum);
      }
      out[p] = sum;
    }
  }

 private:
  // Numbers d .. d + W - 1 of token j in fp32; behind a.size anything.
  template <typename S> vf numbers(const S *chunk, const float *scale, int64_t j, int64_t d, int64_t first) const {
    const bool pairs = in_pairs<T>(a.dim);
    const S *from = element(chunk, a.dim, j, first + d, pairs);
    vf found;
    if (pairs) {
      S apart[W] = {};
      if (d + W <= a.size)
        for (int i = 0; i < W; ++i) apart[i] = from[2 * i];
      else
        for (int i = 0; d + i < a.size; ++i) apart[i] = from[2 * i];
      found = load(apart);
    } else {
      found = load_up_to(from, a.size - d);
    }
    return scale ? found * splat(scale[j]) : found;
  }

  template <typename S> void take(const S *chunk, const float *scale, int64_t p, int64_t d) {
    vf logits[CHUNK], most = splat(-__builtin_inff()), total = {}, sum = {};
    for (int64_t j = 0; j < a.pool; ++j) {
      logits[j] = numbers(chunk, scale, p * a.pool + j, d, a.size) + load_up_to(a.places + j * a.size + d, a.size - d);
      most = logits[j] > most ? logits[j] : most;
    }
    for (int64_t j = 0; j < a.pool; ++j) {
      const vf counts = exp(logits[j] - most);
      total = total + counts;
      sum = madd(counts, numbers(chunk, scale, p * a.pool + j, d, 0), sum);
    }
    store_up_to(keys + p * a.size + d, sum / total, a.size - d);
  }

  float product(const T *q, const float *k) const {
    vf lanes[CHUNK / W] = {};
    for (int64_t i = 0; i < a.size; i += CHUNK)
      for (int c = 0; c < CHUNK / W; ++c)
        if (const int64_t at = i + c * W; at < a.size)
          lanes[c] = madd(load_up_to(q + at, a.size - at), load_up_to(k + at, a.size - at), lanes[c]);
    alignas(64) float sums[CHUNK];
    for (int c = 0; c < CHUNK / W; ++c) store(sums + c * W, lanes[c]);
    return sum64(sums);
  }

  const IndexScores &a;
  int64_t pools;
  float *keys;
};

template <typename Chunk> void score_items(const IndexScores &a) {
  share_out(a.item_count, a.threads, [&](int64_t n) {
    const Item &item = a.items[n];
    const Chunk chunk(a, arena(Chunk::bytes(a)), item.slot);
    for (int64_t row = item.row_begin; row < item.row_end; ++row)
      chunk.of(row, item.key_start, a.out + (row * a.keys + item.key_start) / a.pool);
  });
}

// The greatest scores of a chunk's keys, whose parts lie in those of all KV heads.
template <typename T> class BlockChunk {
 public:
  static int64_t bytes(const BlockScores &a) { return ScoredKeys<T>::bytes(a.size); }

  BlockChunk(const BlockScores &a, Scratch scratch, int64_t slot)
      : a(a), scored(scratch, a.size, in_pairs<T>(a.dim) && in_pairs<T>(a.size) && !a.k_scale) {
    const int64_t part = a.size / a.heads;
    for (int64_t head = 0; head < a.heads; ++head) {
      const int64_t at = (slot * a.heads + head) * CHUNK * a.dim, to = head * part * CHUNK;
      const float *scale = a.k_scale ? a.k_scale + (slot * a.heads + head) * CHUNK : nullptr;
      if (scored.pairs) memcpy(scored.in_pairs() + to, static_cast<const T *>(a.k) + at, part * CHUNK * sizeof(T));
      else if (scale) take(static_cast<const int8_t *>(a.k) + at, scale, scored.keys + to);
      else take(static_cast<const T *>(a.k) + at, scale, scored.keys + to);
    }
  }

  // out [N, chunks], of this chunk: of keys key_start .. key_start + 63.
  void of(int64_t row, int64_t key_start, float *out) const {
    const int64_t seen = a.positions[row] - key_start + 1;
    scored.by_head(static_cast<const T *>(a.q) + row * a.heads * a.size, a.heads, [&](int64_t head, const float *s) {
      float most = -__builtin_inff();
      for (int64_t j = 0; j < CHUNK && j < seen; ++j)
        if (s[j] > most || s[j] != s[j]) most = s[j];
      out[head * a.chunks] = most;
    });
  }

 private:
  // The first I / N numbers of a KV head's keys [D, 64], in fp32.
  template <typename S> void take(const S *from, const float *scale, float *to) const {
    const bool stored = in_pairs<T>(a.dim);
    for (int64_t d = 0; d < a.size / a.heads; ++d)
      for (int64_t j = 0; j < CHUNK; ++j) {
        float x;
        widen(from + (stored ? d / 2 * 2 * CHUNK + 2 * j + d % 2 : d * CHUNK + j), &x, 1);
        to[d * CHUNK + j] = scale ? x * scale[j] : x;
      }
  }

  const BlockScores &a;
  const ScoredKeys<T> scored;
};

// The numbers of `count` <= 64 chosen tokens, to the tokens of one chunk.
template <typename S> void gather_chunk(const Gather &g, int64_t row, int64_t chunk, int64_t count, bool stored, bool made) {
  const int32_t *table = g.tables + row * g.table, *chosen = g.chosen + row * g.count + chunk * CHUNK;
  const int64_t width = g.dim - g.first, index = row * g.chunks + chunk;
  S *to = static_cast<S *>(g.to) + index * CHUNK * width;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t slot = table[chosen[j] / CHUNK], at = chosen[j] % CHUNK;
    const S *from = element(static_cast<const S *>(g.v) + slot * CHUNK * g.dim, g.dim, at, g.first, stored);
    S *here = const_cast<S *>(element(to, width, j, 0, made));
    if (!stored && !made) memcpy(here, from, width * sizeof(S));
    else if (stored && made)
      for (int64_t d = 0; d < width; ++d) here[2 * d] = from[2 * d];
    else
      for (int64_t d = 0; d < width; ++d) here[d << made] = from[d << stored];
    if (g.to_scale) g.to_scale[index * CHUNK + j] = g.v_scale[slot * CHUNK + at];
  }
}

}  // namespace

template <typename T> void index_scores(const IndexScores &a) {
  if (a.pool > 1) return score_items<PooledChunk<T>>(a);
  score_items<IndexerChunk<T>>(a);
}

HEADRACE_BOTH_TYPES(index_scores, IndexScores)

template <typename T> void block_scores(const BlockScores &a) {
  share_out(a.item_count, a.threads, [&](int64_t n) {
    const Item &item = a.items[n];
    const BlockChunk<T> chunk(a, arena(BlockChunk<T>::bytes(a)), item.slot);
    for (int64_t row = item.row_begin; row < item.row_end; ++row)
      chunk.of(row, item.key_start, a.out + row * a.heads * a.chunks + item.key_start / CHUNK);
  });
}

HEADRACE_BOTH_TYPES(block_scores, BlockScores)

template <typename T> void gather(const Gather &g) {
  const bool stored = in_pairs<T>(g.dim), made = in_pairs<T>(g.dim - g.first);
  share_out(g.rows * g.chunks, g.threads, [&](int64_t n) {
    const int64_t row = n / g.chunks, chunk = n % g.chunks, left = g.count - chunk * CHUNK;
    const int64_t count = left < CHUNK ? left : CHUNK;
    g.v_scale ? gather_chunk<int8_t>(g, row, chunk, count, stored, made) : gather_chunk<T>(g, row, chunk, count, stored, made);
  });
}

HEADRACE_BOTH_TYPES(gather, Gather)

}  // namespace headrace::HEADRACE_NS
