// What the machine can do at best, beside which the kernels are measured: a plain read of memory and multiply-adds on
// registers, the fastest of this instruction set.
#include "common/shares.h"
#include "isa/simd.h"
#include "isa/tiles.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

namespace {

// 8 independent streams side by side, so that their additions are no chain.
uint32_t read_part(const char *from, int64_t bytes) {
  vu sum[8];
  each<8>([&](auto i) HEADRACE_ALWAYS_INLINE { sum[i] = vu{}; });
  for (int64_t at = 0; at + 8 * 4 * W <= bytes; at += 8 * 4 * W)
    each<8>([&](auto i) HEADRACE_ALWAYS_INLINE {
      sum[i] ^= reinterpret_cast<vu>(load(reinterpret_cast<const float *>(from + at + i * 4 * W)));
    });
  uint32_t all = 0;
  each<8>([&](auto i) HEADRACE_ALWAYS_INLINE {
    for (int j = 0; j < W; ++j) all ^= sum[i][j];
  });
  return all;
}

#ifdef __AMX_BF16__

constexpr int64_t ROUND = 4 * 2 * TILE * TILE * STEP_INPUTS;  // operations of a round: four tiles of sums

float multiply_part(int64_t rounds) {
  alignas(64) bf16 ones[TILE * STEP_INPUTS];
  alignas(64) float sums[TILE * TILE];
  for (bf16 &one : ones) one = 0x3f80;
  Tiles tiles;
  tiles.take(TILE);
  clear_sums();
  _tile_loadd(4, ones, 2 * STEP_INPUTS);
  _tile_loadd(5, ones, 2 * STEP_INPUTS);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, sums, 4 * TILE);
  return sums[0];
}

#else

// One operand of multiply-adds, two of bf16 in each place where the processor has those, and a product added to a sum.
#ifdef __AVX512BF16__
constexpr int64_t EACH = 4;  // operations of an element: two multiply-adds
HEADRACE_INLINE vf multiply_add(vf sum, vf x) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)x); }
#else
constexpr int64_t EACH = 2;
HEADRACE_INLINE vf multiply_add(vf sum, vf x) { return madd(sum, x, x); }  // no product is a constant
#endif

constexpr int SUMS = W == 16 ? 16 : 12;  // more than two multipliers' latency needs; they and a factor fit into the registers
constexpr int64_t ROUND = SUMS * W * EACH;

// Sums that differ from the start and a factor it does not know keep the compiler from merging or folding them.
float multiply_part(int64_t rounds) {
  float answer = 0.0f;
  volatile int32_t ones = 0x3f803f80;  // two bf16, or one float a little above
  vf sum[SUMS];
  each<SUMS>([&](auto i) HEADRACE_ALWAYS_INLINE { sum[i] = splat(i); });
  const vf x = reinterpret_cast<vf>(vi{} + ones);
  for (int64_t round = 0; round < rounds; ++round)
    each<SUMS>([&](auto i) HEADRACE_ALWAYS_INLINE { sum[i] = multiply_add(sum[i], x); });
  each<SUMS>([&](auto i) HEADRACE_ALWAYS_INLINE { answer += sum[i][0]; });
  return answer;
}

#endif

}  // namespace

uint32_t probe_read(const void *from, int64_t bytes, int threads) {
  const int64_t part = bytes / threads / 64 * 64;
  uint32_t all = 0;
  share_out(threads, threads, [&](int64_t i) {
    __atomic_fetch_xor(&all, read_part(static_cast<const char *>(from) + i * part, part), __ATOMIC_RELAXED);
  });
  return all;
}

int64_t probe_multiply(int64_t rounds, int threads) {
  int positive = 0;
  share_out(threads, threads, [&](int64_t) {
    if (multiply_part(rounds) > 0.0f) __atomic_fetch_add(&positive, 1, __ATOMIC_RELAXED);
  });
  return rounds * ROUND * positive;
}

}  // namespace headrace::HEADRACE_NS
