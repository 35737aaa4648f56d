// The formats of codes of two to six bits: see codes.h.
#pragma once

#include "isa/pairs.h"
#include "linear/byte_lanes.h"
#include "linear/code_values.h"
#include "linear/passes.h"

namespace headrace::HEADRACE_NS {

// The low four bits of 16 outputs from `at` on, as W words that hold two inputs of four lots of 16 outputs.
HEADRACE_INLINE vu words_of(const byte *pair, int at) {
  vu words;
  memcpy(&words, pair + at % 16 * 4, sizeof words);
  return words;
}

constexpr int shift_of(int odd, int at) { return 16 * odd + at / 16 * 4; }

// Two bits of W outputs from `at` on, of bytes [16 outputs][2 inputs] with those of four lots of 16 outputs.
HEADRACE_INLINE vu pairs_of_bits(const byte *pair, int odd, int at) {
  vh bytes;
  memcpy(&bytes, pair + at % 16 * 2, sizeof bytes);
  return __builtin_convertvector(bytes, vu) >> (8 * odd + at / 16 * 2) & 3u;
}

// One bit, of words of 32 [4] with those of 16 outputs by two inputs.
HEADRACE_INLINE vu bits_of(const byte *words, int odd, int at) {
  uint32_t bits;
  memcpy(&bits, words + at / 16 * 4, sizeof bits);
  vu places;
  for (int lane = 0; lane < W; ++lane) places[lane] = 2 * lane;
  return (vu{} + bits) >> (places + (2 * (at % 16) + odd)) & 1u;
}

#ifdef __AVX512BF16__
// 32 bytes, each in a word of 16 bits.
HEADRACE_INLINE __m512i widened(const byte *w) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(w)));
}

// Four numbers, eight times.
HEADRACE_INLINE __m512i fours(const bf16 *values) {
  int64_t four;
  memcpy(&four, values, sizeof four);
  return _mm512_set1_epi64(four);
}
#endif

template <typename Values> struct FourBits {
  static constexpr int64_t BYTES = 64;
  static constexpr bool GROUPED = true, FILLS_L1 = false;
  Values values;

  struct Reader {
    static constexpr int BYTES = COLUMNS / 2, STEPS = 2, INPUTS = PASS_INPUTS;
    static constexpr int STORED_ROWS = BY_LANES ? LANE_ROWS : PASS_ROWS;
    static constexpr bool LANES = BY_LANES;
    using Same = float;
    const byte *codes;
    Values values;

    const char *memory() const { return reinterpret_cast<const char *>(codes); }

    template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int odd, int64_t column, vf (&x)[C]) const {
      const byte *from = codes + (input - odd) * 32;
      HEADRACE_EACH(c, C, {
        const int at = static_cast<int>(column) + c * W;
        x[c] = numbers(words_of(from, at), shift_of(odd, at));
      });
    }

#ifdef HEADRACE_BYTE_LANES
    static int64_t column(int half, int v) { return lane_column(half, v); }

    template <typename F> HEADRACE_ALWAYS_INLINE void each_number(int64_t input, int half, F f) const {
      each_of(nibbles(codes + input * 32 + 32 * half), values, f);
    }

    template <typename F> HEADRACE_ALWAYS_INLINE static void each_of(LaneBytes bytes, Signed, F f) { each_whole<8>(bytes, f); }
    template <typename F> HEADRACE_ALWAYS_INLINE static void each_of(LaneBytes bytes, Unsigned, F f) {
      each_whole<0>(bytes, f);
    }
    template <typename F> HEADRACE_ALWAYS_INLINE static void each_of(LaneBytes bytes, Table table, F f) {
      ByteTable(table.VALUES).each_number(bytes, f);
    }
#endif

    // Those of the four bits of each word from bit `at` on.
    HEADRACE_ALWAYS_INLINE vf numbers(vu words, int at) const {
#if defined(__AVX512F__)
      return looked_up(words >> at, values.VALUES);
#else
      return of((words >> at) & 15u, values);
#endif
    }

    HEADRACE_ALWAYS_INLINE static vf of(vu codes, Signed) {
      return __builtin_convertvector(reinterpret_cast<vi>(codes) - 8, vf);
    }

    HEADRACE_ALWAYS_INLINE static vf of(vu codes, Unsigned) { return __builtin_convertvector(reinterpret_cast<vi>(codes), vf); }

    HEADRACE_ALWAYS_INLINE static vf of(vu codes, Table table) { return looked_up(codes, table.VALUES); }
  };

  Reader reader(const byte *codes) const { return {codes, values}; }

#ifdef __AVX512BF16__
  // A permutation looks at five bits, so the sixteen values stand twice in the table: no bit need be masked off.
  HEADRACE_ALWAYS_INLINE __m512i table() const {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(values.VALUES)));
  }

  HEADRACE_ALWAYS_INLINE void decode(const byte *w, __m512bh (&out)[4]) const {
    const __m512i all = table(), words = _mm512_loadu_si512(w);
    out[0] = (__m512bh)_mm512_permutexvar_epi16(words, all);
    out[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), all);
    out[2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), all);
    out[3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), all);
  }
#endif
};

typedef FourBits<Signed> Int4;
typedef FourBits<Unsigned> Uint4;
typedef FourBits<Table> Table4;

// 0 .. 31: four bits as above, then the fifth of each, of 16 outputs after 16.
struct Uint5 {
  static constexpr int64_t BYTES = 80;
  static constexpr bool GROUPED = true, FILLS_L1 = false;

  struct Reader {
    static constexpr int BYTES = 40, STEPS = 2, INPUTS = PASS_INPUTS;
    static constexpr int STORED_ROWS = BY_LANES ? LANE_ROWS : PASS_ROWS;
    static constexpr bool LANES = BY_LANES;
    using Same = float;
    const byte *codes;

    const char *memory() const { return reinterpret_cast<const char *>(codes); }

    template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int odd, int64_t column, vf (&x)[C]) const {
      const byte *from = codes + (input - odd) * BYTES;
      HEADRACE_EACH(c, C, {
        const int at = static_cast<int>(column) + c * W;
        const vu fifth = bits_of(from + 64, odd, at);
        const vu code = ((words_of(from, at) >> shift_of(odd, at)) & 15u) | fifth << 4;
        x[c] = __builtin_convertvector(reinterpret_cast<vi>(code), vf);
      });
    }

#ifdef HEADRACE_BYTE_LANES
    static int64_t column(int half, int v) { return lane_column(half, v); }

    template <typename F> HEADRACE_ALWAYS_INLINE void each_number(int64_t input, int half, F f) const {
      const byte *pair = codes + input * BYTES;
      const LaneBytes low = nibbles(pair + 32 * half), fifth = one_bit(pair + 64, half);
      each_whole<0>({low.even | (fifth.even & 0x10101010u), low.odd | (fifth.odd & 0x10101010u)}, f);
    }
#endif
  };

  static Reader reader(const byte *codes) { return {codes}; }

#ifdef __AVX512BF16__
  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    alignas(64) static constexpr bf16 HIGH[32] = {0x4180, 0x4188, 0x4190, 0x4198, 0x41a0, 0x41a8, 0x41b0, 0x41b8,
                                                  0x41c0, 0x41c8, 0x41d0, 0x41d8, 0x41e0, 0x41e8, 0x41f0, 0x41f8,
                                                  0x4180, 0x4188, 0x4190, 0x4198, 0x41a0, 0x41a8, 0x41b0, 0x41b8,
                                                  0x41c0, 0x41c8, 0x41d0, 0x41d8, 0x41e0, 0x41e8, 0x41f0, 0x41f8};
    const __m512i low = Uint4{}.table(), high = _mm512_load_si512(HIGH), words = _mm512_loadu_si512(w);
    const auto one = [&](int c, __m512i index) HEADRACE_ALWAYS_INLINE {
      uint32_t fifth;
      memcpy(&fifth, w + 64 + 4 * c, sizeof fifth);
      const __m512i small = _mm512_permutexvar_epi16(index, low);
      out[c] = (__m512bh)_mm512_mask_permutexvar_epi16(small, fifth, index, high);
    };
    one(0, words);
    one(1, _mm512_srli_epi16(words, 4));
    one(2, _mm512_srli_epi16(words, 8));
    one(3, _mm512_srli_epi16(words, 12));
  }
#endif
};

// -32 .. 31: four bits of q + 32 as above, then bytes [16][2] with two bits more of four lots of 16 outputs.
struct Int6 {
  static constexpr int64_t BYTES = 96;
  static constexpr bool GROUPED = true, FILLS_L1 = false;

  struct Reader {
    static constexpr int BYTES = 48, STEPS = 2, INPUTS = PASS_INPUTS;
    static constexpr int STORED_ROWS = BY_LANES ? LANE_ROWS : PASS_ROWS;
    static constexpr bool LANES = BY_LANES;
    using Same = float;
    const byte *codes;

    const char *memory() const { return reinterpret_cast<const char *>(codes); }

    template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int odd, int64_t column, vf (&x)[C]) const {
      const byte *from = codes + (input - odd) * BYTES;
      HEADRACE_EACH(c, C, {
        const int at = static_cast<int>(column) + c * W;
        const vu high = pairs_of_bits(from + 64, odd, at);
        const vu code = ((words_of(from, at) >> shift_of(odd, at)) & 15u) | high << 4;
        x[c] = __builtin_convertvector(reinterpret_cast<vi>(code) - 32, vf);
      });
    }

#ifdef HEADRACE_BYTE_LANES
    static int64_t column(int half, int v) { return lane_column(half, v); }

    template <typename F> HEADRACE_ALWAYS_INLINE void each_number(int64_t input, int half, F f) const {
      const byte *pair = codes + input * BYTES;
      const LaneBytes low = nibbles(pair + 32 * half), high = two_bits(pair + 64 + 16 * half);
      each_whole<32>({low.even | high.even << 4, low.odd | high.odd << 4}, f);
    }
#endif
  };

  static Reader reader(const byte *codes) { return {codes}; }

#ifdef __AVX512BF16__
  // A permutation of two tables looks at six bits.
  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    alignas(64) static constexpr bf16 VALUES[64] = {
        0xc200, 0xc1f8, 0xc1f0, 0xc1e8, 0xc1e0, 0xc1d8, 0xc1d0, 0xc1c8, 0xc1c0, 0xc1b8, 0xc1b0, 0xc1a8, 0xc1a0,
        0xc198, 0xc190, 0xc188, 0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0,
        0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0,
        0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x4180, 0x4188, 0x4190, 0x4198,
        0x41a0, 0x41a8, 0x41b0, 0x41b8, 0x41c0, 0x41c8, 0x41d0, 0x41d8, 0x41e0, 0x41e8, 0x41f0, 0x41f8};
    constexpr int A_WHERE_SET = 0xca;  // of three bits (mask, a, b)
    const __m512i low = _mm512_load_si512(VALUES), high = _mm512_load_si512(VALUES + 32), four = _mm512_set1_epi16(15);
    const __m512i words = _mm512_loadu_si512(w);
    const __m512i more = widened(w + 64);
    const auto one = [&](__m512i nibbles, __m512i bits) HEADRACE_ALWAYS_INLINE {
      const __m512i index = _mm512_ternarylogic_epi32(four, nibbles, bits, A_WHERE_SET);
      return (__m512bh)_mm512_permutex2var_epi16(low, index, high);
    };
    out[0] = one(words, _mm512_slli_epi16(more, 4));
    out[1] = one(_mm512_srli_epi16(words, 4), _mm512_slli_epi16(more, 2));
    out[2] = one(_mm512_srli_epi16(words, 8), more);
    out[3] = one(_mm512_srli_epi16(words, 12), _mm512_srli_epi16(more, 2));
  }
#endif
};

// Of a table: bytes [16][2] with the lower two bits of four lots of 16 outputs, then the third of each as the fifth of Uint5.
struct Table3 {
  static constexpr int64_t BYTES = 48;
  static constexpr bool GROUPED = true, FILLS_L1 = false;
  Table values;

  struct Reader {
    static constexpr int BYTES = 24, STEPS = 2, INPUTS = PASS_INPUTS;
    static constexpr int STORED_ROWS = BY_LANES ? LANE_ROWS : PASS_ROWS;
    static constexpr bool LANES = BY_LANES;
    using Same = float;
    const byte *codes;
    Table values;

    const char *memory() const { return reinterpret_cast<const char *>(codes); }

    template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int odd, int64_t column, vf (&x)[C]) const {
      const byte *from = codes + (input - odd) * BYTES;
      HEADRACE_EACH(c, C, {
        const int at = static_cast<int>(column) + c * W;
        const vu low = pairs_of_bits(from, odd, at), third = bits_of(from + 32, odd, at);
        x[c] = looked_up(low | third << 2, values.VALUES);
      });
    }

#ifdef HEADRACE_BYTE_LANES
    static int64_t column(int half, int v) { return lane_column(half, v); }

    template <typename F> HEADRACE_ALWAYS_INLINE void each_number(int64_t input, int half, F f) const {
      const byte *pair = codes + input * BYTES;
      const LaneBytes low = two_bits(pair + 16 * half), third = one_bit(pair + 32, half);
      const LaneBytes all = {low.even | (third.even & 0x04040404u), low.odd | (third.odd & 0x04040404u)};
      ByteTable(values.VALUES).each_number(all, f);
    }
#endif
  };

  Reader reader(const byte *codes) const { return {codes, values}; }

#ifdef __AVX512BF16__
  // Four numbers stand in a table eight times, so that bits above the two do no harm.
  HEADRACE_ALWAYS_INLINE void decode(const byte *w, __m512bh (&out)[4]) const {
    const __m512i low = fours(values.VALUES), high = fours(values.VALUES + 4), codes = widened(w);
    const auto one = [&](int c, __m512i index) HEADRACE_ALWAYS_INLINE {
      uint32_t third;
      memcpy(&third, w + 32 + 4 * c, sizeof third);
      const __m512i small = _mm512_permutexvar_epi16(index, low);
      out[c] = (__m512bh)_mm512_mask_permutexvar_epi16(small, third, index, high);
    };
    one(0, codes);
    one(1, _mm512_srli_epi16(codes, 2));
    one(2, _mm512_srli_epi16(codes, 4));
    one(3, _mm512_srli_epi16(codes, 6));
  }
#endif
};

// 0 .. 3: bytes [16][2] with two bits of four lots of 16 outputs.
struct Uint2 {
  static constexpr int64_t BYTES = 32;
  static constexpr bool GROUPED = true, FILLS_L1 = false;

  struct Reader {
    static constexpr int BYTES = 16, STEPS = 2, INPUTS = PASS_INPUTS;
    static constexpr int STORED_ROWS = BY_LANES ? LANE_ROWS : PASS_ROWS;
    static constexpr bool LANES = BY_LANES;
    using Same = float;
    const byte *codes;

    const char *memory() const { return reinterpret_cast<const char *>(codes); }

    template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int odd, int64_t column, vf (&x)[C]) const {
      const byte *from = codes + (input - odd) * BYTES;
      HEADRACE_EACH(c, C, {
        const vu code = pairs_of_bits(from, odd, static_cast<int>(column) + c * W);
        x[c] = __builtin_convertvector(reinterpret_cast<vi>(code), vf);
      });
    }

#ifdef HEADRACE_BYTE_LANES
    static int64_t column(int half, int v) { return lane_column(half, v); }

    template <typename F> HEADRACE_ALWAYS_INLINE void each_number(int64_t input, int half, F f) const {
      each_whole<0>(two_bits(codes + input * BYTES + 16 * half), f);
    }
#endif
  };

  static Reader reader(const byte *codes) { return {codes}; }

#ifdef __AVX512BF16__
  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    const __m512i all = fours(Unsigned::VALUES), codes = widened(w);
    out[0] = (__m512bh)_mm512_permutexvar_epi16(codes, all);
    out[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 2), all);
    out[2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), all);
    out[3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 6), all);
  }
#endif
};

}  // namespace headrace::HEADRACE_NS
