// Keys of a chunk that are its values as well (latent attention): the pool has these alone, and they are transposed for the lanes
// that meet them as keys, [64][D] to [D][64], or pairs of tokens to pairs of elements (vnni.h). They are copied: no bit changes.
#pragma once

#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

template <int BYTES>
using WordOf = std::conditional_t<BYTES == 1, uint8_t, std::conditional_t<BYTES == 2, uint16_t, uint32_t>>;

// A vector of COUNT words of so many bytes.
template <int BYTES, int COUNT> struct Words {
  typedef WordOf<BYTES> Row __attribute__((vector_size(COUNT * BYTES)));
  using All = std::make_integer_sequence<int, COUNT>;

  // From the words at FIRST on, one of a and one of b in turn.
  template <int FIRST> static HEADRACE_ALWAYS_INLINE inline Row in_turn(Row a, Row b) { return merged<FIRST>(a, b, All()); }

  // Every second word of a and of b behind it, from the FIRST one on.
  template <int FIRST> static HEADRACE_ALWAYS_INLINE inline Row every_second(Row a, Row b) {
    return thinned<FIRST>(a, b, All());
  }

 private:
  template <int FIRST, int... I>
  static HEADRACE_ALWAYS_INLINE inline Row merged(Row a, Row b, std::integer_sequence<int, I...>) {
    return chosen<(FIRST + I / 2 + I % 2 * COUNT)...>(a, b);
  }

  template <int FIRST, int... I>
  static HEADRACE_ALWAYS_INLINE inline Row thinned(Row a, Row b, std::integer_sequence<int, I...>) {
    return chosen<(FIRST + 2 * I)...>(a, b);
  }

  template <int... I> static HEADRACE_ALWAYS_INLINE inline Row chosen(Row a, Row b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, Row{I...});
#endif
  }
};

// As many words as one instruction shuffles at will, and squares of them that registers hold.
constexpr int side_of(int bytes) { return W == 16 ? 16 : 16 / bytes; }

// x[i][j] becomes x[j][i]. Each step brings the first bit of the number i SIDE + j to its end.
template <int BYTES, int SIDE, int LEFT = SIDE> HEADRACE_INLINE void transpose(typename Words<BYTES, SIDE>::Row (&x)[SIDE]) {
  if constexpr (LEFT > 1) {
    typename Words<BYTES, SIDE>::Row next[SIDE];
    each<SIDE / 2>([&](auto i) HEADRACE_ALWAYS_INLINE {
      next[2 * i] = Words<BYTES, SIDE>::template in_turn<0>(x[i], x[i + SIDE / 2]);
      next[2 * i + 1] = Words<BYTES, SIDE>::template in_turn<SIDE / 2>(x[i], x[i + SIDE / 2]);
    });
    transpose<BYTES, SIDE, LEFT / 2>(next);
    each<SIDE>([&](auto i) HEADRACE_ALWAYS_INLINE { x[i] = next[i]; });
  }
}

// Columns of values [64][D], as many as a square has, as keys [SIDE][64].
template <int SIDE, typename S> HEADRACE_INLINE void transpose_columns(const S *values, int64_t dim, S *keys) {
  for (int64_t j = 0; j < CHUNK; j += SIDE) {
    typename Words<sizeof(S), SIDE>::Row x[SIDE];
    each<SIDE>([&](auto i) HEADRACE_ALWAYS_INLINE { memcpy(&x[i], values + (j + i) * dim, sizeof x[i]); });
    transpose<sizeof(S), SIDE>(x);
    each<SIDE>([&](auto i) HEADRACE_ALWAYS_INLINE { memcpy(keys + i * CHUNK + j, &x[i], sizeof x[i]); });
  }
}

// Columns of values [32][D][2], twice as many as a square of pairs has, as keys [SIDE][64][2].
template <int SIDE, typename S> HEADRACE_INLINE void transpose_pairs(const S *values, int64_t dim, S *keys) {
  using Halves = Words<sizeof(S), 2 * SIDE>;
  for (int64_t j = 0; j < CHUNK; j += SIDE) {
    typename Words<2 * sizeof(S), SIDE>::Row x[SIDE];
    each<SIDE / 2>([&](auto i) HEADRACE_ALWAYS_INLINE {  // two tokens
      typename Halves::Row first, second;
      memcpy(&first, values + (j + 2 * i) * dim, sizeof first);
      memcpy(&second, values + (j + 2 * i) * dim + 2 * SIDE, sizeof second);
      x[2 * i] = (typename Words<2 * sizeof(S), SIDE>::Row) Halves::template every_second<0>(first, second);
      x[2 * i + 1] = (typename Words<2 * sizeof(S), SIDE>::Row) Halves::template every_second<1>(first, second);
    });
    transpose<2 * sizeof(S), SIDE>(x);
    each<SIDE>([&](auto i) HEADRACE_ALWAYS_INLINE { memcpy(keys + 2 * (i * CHUNK + j), &x[i], sizeof x[i]); });
  }
}

// The first `count` numbers of each value of a chunk [64, D] as keys. PAIRS: of tokens, and of elements.
template <bool PAIRS, typename S>
HEADRACE_APART void keys_of_values(const S *values, int64_t dim, int64_t count, S *keys) {
  constexpr int SIDE = side_of(PAIRS ? 2 * sizeof(S) : sizeof(S)), COLUMNS = PAIRS ? 2 * SIDE : SIDE;
  int64_t d = 0;
  for (; d + COLUMNS <= count; d += COLUMNS)
    if constexpr (PAIRS) transpose_pairs<SIDE>(values + 2 * d, dim, keys + d * CHUNK);
    else transpose_columns<SIDE>(values + d, dim, keys + d * CHUNK);
  for (; d < count; ++d)
    for (int64_t j = 0; j < CHUNK; ++j)
      if constexpr (PAIRS) keys[d / 2 * 2 * CHUNK + 2 * j + d % 2] = values[j / 2 * 2 * dim + 2 * d + j % 2];
      else keys[d * CHUNK + j] = values[j * dim + d];
}

}  // namespace headrace::HEADRACE_NS
