// The formats of codes. Each stands for a number that is exact in bf16. How they lie: linear_quant.cpp.
//
// A format has BYTES for each pair of inputs of 64 outputs; a Reader (a policy of passes.h) for any instruction set; and where
// pairs of bf16 are multiplied, decode(), which turns them into out[4][16 outputs][2] in registers of AVX-512. GROUPED: inputs
// in runs under scales of their own (scales.h), else there is one fp32 for each output. FILLS_L1: rows meet a block of them in
// L1, which has no room for more where it is small.
#pragma once

#include "isa/pairs.h"
#include "linear/passes.h"

namespace headrace::HEADRACE_NS {

// ---- 8 bits ----------------------------------------------------------------------------------------------------------

// What 8 bits say as a whole number, those of 16 outputs by one input of a pair before those by the other,
struct Whole {
  HEADRACE_ALWAYS_INLINE static vf load(const byte *pair, int odd, int64_t at) {
    return HEADRACE_NS::load(reinterpret_cast<const int8_t *>(pair + at / 16 * 32 + odd * 16 + at % 16));
  }

#ifdef __AVX512BF16__
  // A code's fp32 has nothing in its lower half: the pair is two upper halves.
  HEADRACE_INLINE __m512i pairs(const byte *w) { return _mm512_or_si512(_mm512_srli_epi32(wide(w), 16), wide(w + 16)); }

  HEADRACE_INLINE __m512i wide(const byte *w) {
    const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(w)));
    return (__m512i)_mm512_cvtepi32_ps(codes);
  }
#endif
};

// or as a number of 4 bits of exponent and 3 of mantissa, none of them NaN (E4M3 of OCP's 8-bit floating point), both inputs of a
// pair side by side.
struct Small {
  HEADRACE_ALWAYS_INLINE static vf load(const byte *pair, int odd, int64_t at) {
    vh both;
    memcpy(&both, pair + 2 * at, sizeof both);
    const vu c = __builtin_convertvector(both, vu) >> (8 * odd);
    const vu rest = (c & 0x7fu) << 20;
    const vf normal = reinterpret_cast<vf>(rest + (120u << 23));
    const vf small = reinterpret_cast<vf>(rest + (121u << 23)) - splat(number(121u << 23));  // subnormal ones
    const vf size = rest < (1u << 23) ? small : normal;
    return reinterpret_cast<vf>(reinterpret_cast<vu>(size) | (c & 0x80u) << 24);
  }

#ifdef __AVX512BF16__
  // bf16 has the same bits behind a greater exponent: 120 is added to it. Of subnormal numbers, bits are flipped before, so that
  // this makes them what they are: the lowest three say which.
  HEADRACE_INLINE __m512i pairs(const byte *w) {
    alignas(64) static constexpr bf16 FLIPPED[32] = {0xc400, 0xff10, 0xffa0, 0xfff0, 0x0040, 0x0070, 0x0020, 0x0010};
    constexpr int AND_XOR = 0x6a;  // of three bits: (a and b) xor c
    const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(w)));
    const __mmask32 small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
    const __m512i flipped = _mm512_maskz_permutexvar_epi16(small, codes, _mm512_load_si512(FLIPPED));
    const __m512i kept = _mm512_set1_epi16(static_cast<int16_t>(0x87f0));  // all but copies of the sign
    const __m512i moved = _mm512_ternarylogic_epi32(_mm512_slli_epi16(codes, 4), kept, flipped, AND_XOR);
    return _mm512_add_epi16(moved, _mm512_set1_epi16(120 << 7));
  }
#endif
};

template <typename Number, bool IN_GROUPS> struct EightBits {
  static constexpr int64_t BYTES = 128;
  static constexpr bool GROUPED = IN_GROUPS, FILLS_L1 = false;

  struct Reader {
    static constexpr int BYTES = COLUMNS, STEPS = 2, INPUTS = PASS_INPUTS;
    static constexpr bool CHEAP = false;
    using Same = float;
    const byte *codes;  // from an even input on

    const char *memory() const { return reinterpret_cast<const char *>(codes); }

    template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int odd, int64_t column, vf (&x)[C]) const {
      const byte *pair = codes + (input - odd) * BYTES;
      HEADRACE_EACH(c, C, x[c] = Number::load(pair, odd, column + c * W));
    }
  };

#ifdef __AVX512BF16__
  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    for (int c = 0; c < 4; ++c) out[c] = (__m512bh)Number::pairs(w + c * 32);
  }
#endif
};

typedef EightBits<Whole, false> Int8;
typedef EightBits<Whole, true> Bytes;
typedef EightBits<Small, true> E4m3;

// ---- fewer bits ------------------------------------------------------------------------------------------------------

// What four bits stand for, in bf16.
struct Signed {
  static constexpr bf16 VALUES[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
};

struct Unsigned {
  static constexpr bf16 VALUES[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                      0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
};

// 2 bits of exponent, 1 of mantissa (OCP Microscaling Formats).
struct E2m1Values {
  static constexpr bf16 VALUES[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                      0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
};

// The low four bits of 16 outputs from `at` on, as W words that hold two inputs of four lots of 16 outputs.
HEADRACE_INLINE vu words_of(const byte *pair, int at) {
  vu words;
  memcpy(&words, pair + at % 16 * 4, sizeof words);
  return words;
}

constexpr int shift_of(int odd, int at) { return 16 * odd + at / 16 * 4; }

template <typename Values> struct FourBits {
  static constexpr int64_t BYTES = 64;
  static constexpr bool GROUPED = true, FILLS_L1 = false;

  struct Reader {
    static constexpr int BYTES = COLUMNS / 2, STEPS = 2, INPUTS = PASS_INPUTS;
    static constexpr bool CHEAP = false;
    using Same = float;
    const byte *codes;

    const char *memory() const { return reinterpret_cast<const char *>(codes); }

    template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int odd, int64_t column, vf (&x)[C]) const {
      const byte *from = codes + (input - odd) * 32;
      HEADRACE_EACH(c, C, {
        const int at = static_cast<int>(column) + c * W;
        x[c] = values(words_of(from, at), shift_of(odd, at));
      });
    }

    // Those of the four bits of each word from bit `at` on.
    HEADRACE_ALWAYS_INLINE static vf values(vu words, int at) {
#if defined(__AVX512F__)
      const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)Values::VALUES)), 16);
      return reinterpret_cast<vf>(_mm512_permutexvar_epi32(reinterpret_cast<__m512i>(words >> at), upper));
#else
      return of((words >> at) & 15u, static_cast<const Values *>(nullptr));
#endif
    }

    HEADRACE_ALWAYS_INLINE static vf of(vu codes, const Signed *) {
      return __builtin_convertvector(reinterpret_cast<vi>(codes) - 8, vf);
    }

    HEADRACE_ALWAYS_INLINE static vf of(vu codes, const Unsigned *) {
      return __builtin_convertvector(reinterpret_cast<vi>(codes), vf);
    }

    // Half of 0, 1, 2, 3, 4, 6, 8, 12, the last bit of four being the sign.
    HEADRACE_ALWAYS_INLINE static vf of(vu codes, const E2m1Values *) {
      const vu size = codes & 7u, twice = size < 5u ? size : size == 5u ? vu{} + 6u : size == 6u ? vu{} + 8u : vu{} + 12u;
      const vf value = __builtin_convertvector(reinterpret_cast<vi>(twice), vf) * 0.5f;
      return reinterpret_cast<vf>(reinterpret_cast<vu>(value) | (codes & 8u) << 28);
    }
  };

#ifdef __AVX512BF16__
  // A permutation looks at five bits, so the sixteen values stand twice in the table: no bit need be masked off.
  HEADRACE_INLINE __m512i table() {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(Values::VALUES)));
  }

  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    const __m512i values = table(), words = _mm512_loadu_si512(w);
    out[0] = (__m512bh)_mm512_permutexvar_epi16(words, values);
    out[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), values);
    out[2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), values);
    out[3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), values);
  }
#endif
};

typedef FourBits<Signed> Int4;
typedef FourBits<Unsigned> Uint4;
typedef FourBits<E2m1Values> E2m1;

// 0 .. 31: four bits as above, then the fifth of each, of 16 outputs after 16.
struct Uint5 {
  static constexpr int64_t BYTES = 80;
  static constexpr bool GROUPED = true, FILLS_L1 = false;

  struct Reader {
    static constexpr int BYTES = 40, STEPS = 2, INPUTS = PASS_INPUTS;
    static constexpr bool CHEAP = false;
    using Same = float;
    const byte *codes;

    const char *memory() const { return reinterpret_cast<const char *>(codes); }

    template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int odd, int64_t column, vf (&x)[C]) const {
      const byte *from = codes + (input - odd) * BYTES;
      HEADRACE_EACH(c, C, {
        const int at = static_cast<int>(column) + c * W;
        uint32_t bits;
        memcpy(&bits, from + 64 + at / 16 * 4, sizeof bits);
        vu fifth = vu{} + bits;
        for (int lane = 0; lane < W; ++lane) fifth[lane] >>= 2 * (at % 16 + lane) + odd;
        const vu code = ((words_of(from, at) >> shift_of(odd, at)) & 15u) | (fifth & 1u) << 4;
        x[c] = __builtin_convertvector(reinterpret_cast<vi>(code), vf);
      });
    }
  };

#ifdef __AVX512BF16__
  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    alignas(64) static constexpr bf16 HIGH[32] = {0x4180, 0x4188, 0x4190, 0x4198, 0x41a0, 0x41a8, 0x41b0, 0x41b8,
                                                  0x41c0, 0x41c8, 0x41d0, 0x41d8, 0x41e0, 0x41e8, 0x41f0, 0x41f8,
                                                  0x4180, 0x4188, 0x4190, 0x4198, 0x41a0, 0x41a8, 0x41b0, 0x41b8,
                                                  0x41c0, 0x41c8, 0x41d0, 0x41d8, 0x41e0, 0x41e8, 0x41f0, 0x41f8};
    const __m512i low = Uint4::table(), high = _mm512_load_si512(HIGH), words = _mm512_loadu_si512(w);
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
    static constexpr bool CHEAP = false;
    using Same = float;
    const byte *codes;

    const char *memory() const { return reinterpret_cast<const char *>(codes); }

    template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int odd, int64_t column, vf (&x)[C]) const {
      const byte *from = codes + (input - odd) * BYTES;
      HEADRACE_EACH(c, C, {
        const int at = static_cast<int>(column) + c * W;
        vh pairs;
        memcpy(&pairs, from + 64 + at % 16 * 2, sizeof pairs);
        const vu high = __builtin_convertvector(pairs, vu) >> (8 * odd + at / 16 * 2);
        const vu code = ((words_of(from, at) >> shift_of(odd, at)) & 15u) | (high & 3u) << 4;
        x[c] = __builtin_convertvector(reinterpret_cast<vi>(code) - 32, vf);
      });
    }
  };

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
    const __m512i more = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(w + 64)));
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

// f(LinearOf<the format of a's weights>).
template <typename F> void with_format(const LinearQuant &a, F f) {
  switch (a.form) {
    case Form::int8: return f(LinearOf<Int8>{a});
    case Form::bytes: return f(LinearOf<Bytes>{a});
    case Form::int4: return f(LinearOf<Int4>{a});
    case Form::uint4: return f(LinearOf<Uint4>{a});
    case Form::uint5: return f(LinearOf<Uint5>{a});
    case Form::int6: return f(LinearOf<Int6>{a});
    case Form::e2m1: return f(LinearOf<E2m1>{a});
    case Form::e4m3: return f(LinearOf<E4m3>{a});
    default: break;  // no codes
  }
}

#ifdef __AVX512BF16__

struct Decoded {
  static constexpr int64_t BYTES = 256;
  static constexpr bool FILLS_L1 = true;

  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    for (int c = 0; c < 4; ++c) out[c] = (__m512bh)_mm512_loadu_si512(w + c * 64);
  }
};

// `pairs` pairs decoded, fetching meanwhile the codes AHEAD bytes on, if any.
template <typename Codes, int64_t AHEAD = 0>
HEADRACE_APART void decode_block(const byte *codes, int64_t pairs, byte *decoded) {
#pragma GCC unroll 1
  for (int64_t i = 0; i < pairs; ++i, codes += Codes::BYTES) {
    if constexpr (AHEAD > 0) fetch_twice<Codes::BYTES / 64>(codes + AHEAD);
    __m512bh weight[4];
    Codes::decode(codes, weight);
    for (int c = 0; c < 4; ++c) _mm512_store_si512(decoded + i * Decoded::BYTES + c * 64, (__m512i)weight[c]);
  }
}

#endif

}  // namespace headrace::HEADRACE_NS
