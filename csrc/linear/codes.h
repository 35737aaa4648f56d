// The formats of codes. Each stands for a number that is exact in bf16. How they lie: linear_quant.cpp.
//
// A format has BYTES for each pair of inputs of 64 outputs; a Reader (a policy of passes.h) for any instruction set, with
// each_number for AVX2 (byte_lanes.h); and where pairs of bf16 are multiplied, decode(), which turns them into
// out[4][16 outputs][2] in registers of AVX-512. GROUPED: inputs in runs under scales of their own (scales.h), else there is one
// fp32 for each output. FILLS_L1: rows meet a block of them in L1, which has no room for more where it is small.
#pragma once

#include "isa/pairs.h"
#include "linear/few_bits.h"
#include "linear/passes.h"

namespace headrace::HEADRACE_NS {

// What 8 bits say as a whole number, those of 16 outputs by one input of a pair before those by the other,
struct Whole {
  static constexpr int STORED_ROWS = PASS_ROWS;

  static int64_t column(int half, int v) { return 16 * v + 8 * half; }

  HEADRACE_ALWAYS_INLINE static vf load(const byte *pair, int odd, int64_t at) {
    return HEADRACE_NS::load(reinterpret_cast<const int8_t *>(pair + at / 16 * 32 + odd * 16 + at % 16));
  }

#ifdef HEADRACE_BYTE_LANES
  template <typename F> HEADRACE_ALWAYS_INLINE static void each_number(const byte *pair, int half, F f) {
    each<2>([&](auto p) HEADRACE_ALWAYS_INLINE {
      each<4>([&](auto v) HEADRACE_ALWAYS_INLINE { f(v, p, load(pair, p, column(half, v))); });
    });
  }
#endif

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
  static constexpr int STORED_ROWS = BY_LANES ? LANE_ROWS : PASS_ROWS;

  static int64_t column(int half, int v) { return 32 * half + 8 * v; }

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

#ifdef HEADRACE_BYTE_LANES
  template <typename F> HEADRACE_ALWAYS_INLINE static void each_number(const byte *pair, int half, F f) {
    each<2>([&](auto part) HEADRACE_ALWAYS_INLINE {
      each_small(pair + 64 * half + 32 * part,
                 [&](auto i, auto p, vf x) HEADRACE_ALWAYS_INLINE { f(Constant<2 * part + i>{}, p, x); });
    });
  }
#endif

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
    static constexpr int STORED_ROWS = Number::STORED_ROWS;
    static constexpr bool LANES = BY_LANES;
    using Same = float;
    const byte *codes;  // from an even input on

    const char *memory() const { return reinterpret_cast<const char *>(codes); }

    template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int odd, int64_t column, vf (&x)[C]) const {
      const byte *pair = codes + (input - odd) * BYTES;
      HEADRACE_EACH(c, C, x[c] = Number::load(pair, odd, column + c * W));
    }

#ifdef HEADRACE_BYTE_LANES
    static int64_t column(int half, int v) { return Number::column(half, v); }

    template <typename F> HEADRACE_ALWAYS_INLINE void each_number(int64_t input, int half, F f) const {
      Number::each_number(codes + input * BYTES, half, f);
    }
#endif
  };

  static Reader reader(const byte *codes) { return {codes}; }

#ifdef __AVX512BF16__
  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    for (int c = 0; c < 4; ++c) out[c] = (__m512bh)Number::pairs(w + c * 32);
  }
#endif
};

typedef EightBits<Whole, false> Int8;
typedef EightBits<Whole, true> Bytes;
typedef EightBits<Small, true> E4m3;

// f(LinearOf<the format of a's weights>).
template <typename F> void with_format(const LinearQuant &a, F f) {
  switch (a.form) {
    case Form::int8: return f(LinearOf<Int8>{a});
    case Form::bytes: return f(LinearOf<Bytes>{a});
    case Form::int4: return f(LinearOf<Int4>{a});
    case Form::uint4: return f(LinearOf<Uint4>{a});
    case Form::uint5: return f(LinearOf<Uint5>{a});
    case Form::int6: return f(LinearOf<Int6>{a});
    case Form::uint2: return f(LinearOf<Uint2>{a});
    case Form::e2m1:
    case Form::iq4:
    case Form::iq3_s:
    case Form::iq3_xxs:
    case Form::nf4: return f(LinearOf<Table4>{a});
    case Form::int3:
    case Form::iq2:
    case Form::iq1: return f(LinearOf<Table3>{a});
    case Form::e4m3: return f(LinearOf<E4m3>{a});
    default: break;  // no codes
  }
}

// The format itself.
template <typename Codes> Codes format_of(const LinearOf<Codes> &) { return {}; }
inline Table4 format_of(const LinearOf<Table4> &a) { return {table_of(a.form)}; }
inline Table3 format_of(const LinearOf<Table3> &a) { return {table_of(a.form)}; }

#ifdef __AVX512BF16__

struct Decoded {
  static constexpr int64_t BYTES = 256;
  static constexpr bool FILLS_L1 = true;

  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    for (int c = 0; c < 4; ++c) out[c] = (__m512bh)_mm512_loadu_si512(w + c * 64);
  }
};

constexpr int64_t BLOCK_PAIRS = 128;  // decoded at once: 32 KB, which stay in L1 while rows pass by
constexpr int64_t DECODED = BLOCK_PAIRS * Decoded::BYTES;

// The numbers of a pair's even and odd inputs, 64 each, in fp32.
template <typename Codes> HEADRACE_INLINE void decode_wide(Codes format, const byte *w, vf (&even)[4], vf (&odd)[4]) {
  __m512bh pairs[4];
  format.decode(w, pairs);
  each<4>([&](auto c) HEADRACE_ALWAYS_INLINE {
    even[c] = reinterpret_cast<vf>(reinterpret_cast<vu>(pairs[c]) << 16);
    odd[c] = reinterpret_cast<vf>(reinterpret_cast<vu>(pairs[c]) & 0xffff0000u);
  });
}

HEADRACE_INLINE void decode_wide(Bytes, const byte *w, vf (&even)[4], vf (&odd)[4]) {
  each<4>([&](auto c) HEADRACE_ALWAYS_INLINE {
    even[c] = Whole::load(w, 0, 16 * c);
    odd[c] = Whole::load(w, 1, 16 * c);
  });
}

// `pairs` pairs decoded, fetching meanwhile the codes AHEAD bytes on, if any.
template <typename Codes, int64_t AHEAD = 0>
HEADRACE_APART void decode_block(Codes format, const byte *codes, int64_t pairs, byte *decoded) {
#pragma GCC unroll 1
  for (int64_t i = 0; i < pairs; ++i, codes += Codes::BYTES) {
    if constexpr (AHEAD > 0) fetch_twice<(Codes::BYTES + 63) / 64>(codes + AHEAD);
    __m512bh weight[4];
    format.decode(codes, weight);
    for (int c = 0; c < 4; ++c) _mm512_store_si512(decoded + i * Decoded::BYTES + c * 64, (__m512i)weight[c]);
  }
}

#endif

}  // namespace headrace::HEADRACE_NS
