// Scales and offsets of codes, widened from the bits in which a file has them.
//
// Of 64 outputs and a block of inputs there lie, one behind the other, each where the format has it (Scaling in kernels.h): the
// scales [64] and the minima [64] as numbers; the sub-scales [groups][64], a byte each, and the small numbers [groups][64], which
// the minima or the scales are multiplied by, as int8. (kernels.quantized packs them.)
#pragma once

#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

// W numbers of fp16: none is infinite or NaN. Subnormal ones are made by a subtraction, which no flushing to 0 touches.
HEADRACE_INLINE vf load_fp16(const byte *p) {
  vh half;
  memcpy(&half, p, sizeof half);
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(half)));
#elif defined(__F16C__)
  return reinterpret_cast<vf>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(half)));
#else
  const vu bits = __builtin_convertvector(half, vu), sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
  const vf normal = reinterpret_cast<vf>(rest + (112u << 23));
  const vf small = reinterpret_cast<vf>(rest + (113u << 23)) - splat(number(113u << 23));
  const vf size = rest < (1u << 23) ? small : normal;
  return reinterpret_cast<vf>(reinterpret_cast<vu>(size) | sign);
#endif
}

// W powers of 2 as their exponents plus 127.
HEADRACE_INLINE vf load_e8m0(const byte *p) {
  vb exponents;
  memcpy(&exponents, p, sizeof exponents);
  const vu e = reinterpret_cast<vu>(__builtin_convertvector(__builtin_convertvector(exponents, vs), vi)) & 0xffu;
  return reinterpret_cast<vf>(e == 0u ? vu{} + (1u << 22) : e << 23);
}

// W numbers of FP8 (e4m3), none of them NaN. Subnormal ones as in fp16.
HEADRACE_INLINE vf load_e4m3(const byte *p) {
  vb codes;
  memcpy(&codes, p, sizeof codes);
  const vu bits = reinterpret_cast<vu>(__builtin_convertvector(__builtin_convertvector(codes, vs), vi));
  const vu sign = (bits & 0x80u) << 24, rest = (bits & 0x7fu) << 20;
  const vf normal = reinterpret_cast<vf>(rest + (120u << 23));
  const vf small = reinterpret_cast<vf>(rest + (121u << 23)) - splat(number(121u << 23));
  const vf size = rest < (1u << 23) ? small : normal;
  return reinterpret_cast<vf>(reinterpret_cast<vu>(size) | sign);
}

// W sub-scales.
template <Subs SUBS> HEADRACE_INLINE vf load_subs(const byte *p) {
  return SUBS == Subs::e4m3 ? load_e4m3(p) : load(reinterpret_cast<const int8_t *>(p));
}

// n / size, without a division where the size is a power of 2: as a rule it is, and one takes as long as ten products.
HEADRACE_INLINE int64_t divided(int64_t n, int64_t size) {
  return size & (size - 1) ? n / size : n >> __builtin_ctzll(static_cast<uint64_t>(size));
}

HEADRACE_INLINE int64_t size_of(Number number) { return number == Number::fp32 ? 4 : number == Number::e8m0 ? 1 : 2; }

// W numbers from the i-th on.
template <Number NUMBER> HEADRACE_INLINE vf load_numbers(const byte *p, int64_t i) {
  switch (NUMBER) {
    case Number::fp32: return load(reinterpret_cast<const float *>(p) + i);
    case Number::bf16: return load(reinterpret_cast<const bf16 *>(p) + i);
    case Number::fp16: return load_fp16(p + 2 * i);
    default: return load_e8m0(p + i);
  }
}

// Those of 64 outputs.
class BlockScales {
 public:
  static constexpr int64_t OUTPUTS = 64, LINE = 64;

  BlockScales(const Scaling &s, const void *scales, int64_t inputs, int64_t block_of_outputs)
      : s(s), numbers(OUTPUTS * size_of(s.number)), groups(divided(s.block, s.group)),
        bytes(numbers * (s.offset == Offset::minimum ? 2 : 1) +
              OUTPUTS * groups * ((s.subs != Subs::none) + (s.offset != Offset::none))),
        first(static_cast<const byte *>(scales) + block_of_outputs * divided(inputs, s.block) * bytes) {}

  // Scales [runs][64] of as many runs from an input on, and their offsets if there are any. Fetches those of as many more.
  void widen(int64_t input, int64_t runs, float *scales, float *offsets) const {
    const byte *next = first + place(input + runs * s.run), *end = first + place(input + 2 * runs * s.run);
    for (; next < end; next += LINE) __builtin_prefetch(next);
    switch (s.number) {
      case Number::fp32: return widen_numbers<Number::fp32>(input, runs, scales, offsets);
      case Number::bf16: return widen_numbers<Number::bf16>(input, runs, scales, offsets);
      case Number::fp16: return widen_numbers<Number::fp16>(input, runs, scales, offsets);
      default: return widen_numbers<Number::e8m0>(input, runs, scales, offsets);
    }
  }

 private:
  // Where runs lie among those of a group, of a block.
  struct Runs {
    int64_t group, of_group, each;  // the first one's group, those left of it, those of a whole one
  };

  // Where what an input is multiplied by lies: its block's first byte, or among the sub-scales of a block of many groups.
  int64_t place(int64_t k) const {
    const int64_t index = divided(k, s.block), within = k - index * s.block;
    return index * bytes + (within && s.subs != Subs::none ? numbers + divided(within, s.group) * OUTPUTS : 0);
  }

  template <Number NUMBER> void widen_numbers(int64_t input, int64_t runs, float *scales, float *offsets) const {
    switch (s.offset) {
      case Offset::none: return widen_offsets<NUMBER, Offset::none>(input, runs, scales, offsets);
      case Offset::minimum: return widen_offsets<NUMBER, Offset::minimum>(input, runs, scales, offsets);
      default: return widen_offsets<NUMBER, Offset::zero>(input, runs, scales, offsets);
    }
  }

  template <Number NUMBER, Offset OFFSET>
  void widen_offsets(int64_t input, int64_t runs, float *scales, float *offsets) const {
    switch (s.subs) {
      case Subs::none: return widen_blocks<NUMBER, OFFSET, Subs::none>(input, runs, scales, offsets);
      case Subs::whole: return widen_blocks<NUMBER, OFFSET, Subs::whole>(input, runs, scales, offsets);
      default: return widen_blocks<NUMBER, OFFSET, Subs::e4m3>(input, runs, scales, offsets);
    }
  }

  template <Number NUMBER, Offset OFFSET, Subs SUBS>
  void widen_blocks(int64_t input, int64_t runs, float *scales, float *offsets) const {
    const int64_t each = divided(s.group, s.run), index = divided(input, s.block);
    int64_t within = divided(input - index * s.block, s.run);
    const int64_t whole = groups * each;  // runs of a block
    for (const byte *block = first + index * bytes; runs > 0; block += bytes, within = 0) {
      const int64_t count = runs < whole - within ? runs : whole - within;
      const int64_t group = within ? divided(within, each) : 0;
      widen_block<NUMBER, OFFSET, SUBS>(block, {group, (group + 1) * each - within, each}, count, scales, offsets);
      runs -= count;
      scales += count * OUTPUTS;
      offsets += count * OUTPUTS;
    }
  }

  // The same of one block.
  template <Number NUMBER, Offset OFFSET, Subs SUBS>
  void widen_block(const byte *block, Runs where, int64_t runs, float *scales, float *offsets) const {
    constexpr bool MINIMA = OFFSET == Offset::minimum;
    const byte *small = block + numbers * (MINIMA ? 2 : 1) + where.group * OUTPUTS;
    const byte *other = small + (SUBS != Subs::none ? OUTPUTS * groups : 0);
    const int64_t each = where.each;
    for (int64_t c = 0; c < OUTPUTS; c += W) {
      const vf large = load_numbers<NUMBER>(block, c), least = MINIMA ? load_numbers<NUMBER>(block + numbers, c) : vf{};
      int64_t left = where.of_group, at = c;
      vf scale = large, offset = {};
      float *to = scales + c, *beside = offsets + c;
      for (int64_t i = 0; i < runs; at += OUTPUTS, left = each) {
        if (SUBS != Subs::none) scale = large * load_subs<SUBS>(small + at);
        if (OFFSET != Offset::none) offset = -((MINIMA ? least : scale) * load(reinterpret_cast<const int8_t *>(other + at)));
        for (; i < runs && left > 0; ++i, --left, to += OUTPUTS, beside += OUTPUTS) {
          store(to, scale);
          if (OFFSET != Offset::none) store(beside, offset);
        }
      }
    }
  }

  const Scaling &s;
  int64_t numbers, groups, bytes;
  const byte *first;
};

// The sums of `inputs` elements by runs.
template <typename T> void sum_runs(const T *x, int64_t inputs, int64_t run, float *sums) {
  for (int64_t i = 0; i < inputs / run; ++i, x += run) {
    vf lanes = {};
    for (int64_t k = 0; k < run; k += W) lanes += load_up_to(x + k, run - k);
    float part[W];
    store(part, lanes);
    for (int half = W / 2; half > 0; half /= 2)
      for (int lane = 0; lane < half; ++lane) part[lane] += part[lane + half];
    sums[i] = part[0];
  }
}

}  // namespace headrace::HEADRACE_NS
