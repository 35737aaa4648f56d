// States of rows outside of attention over chunks: finished, merged block by block, and merged when finished (docs/attention.md).
//
// D: head size; lane: one (row, query head).
#include "attention/plain.h"
#include "attention/states.h"
#include "attention/vnni.h"
#include "common/arena.h"
#include "isa/simd.h"
#include "kernels.h"

// The first one of glibc, which every system has; the one of 2.29 sets no errno, and is the same otherwise.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver log, log@GLIBC_2.2.5");
#elif defined(__aarch64__) && defined(__GLIBC__)
__asm__(".symver log, log@GLIBC_2.17");
#endif

namespace headrace::HEADRACE_NS {

namespace {

constexpr double LOG_2 = 0.693147180559945309;

// Plain logarithm of the sum of exponentials.
float log_sum(float m, float l, bool base2) {
  return l == 0.0f ? -__builtin_inff() : static_cast<float>(m * (base2 ? LOG_2 : 1.0) + __builtin_log(l));
}

template <typename Math, typename T> void finish_by(const Finish &f) {
  each_lane<Math>(f.lanes, f.dim, f.threads, [&](int64_t lane) {
    float m, l;
    State mine{{arena(room<float>(f.dim)).take<float>(f.dim), &m, &l}};
    Lanes{f.total, lane, f.dim}.copy_to({mine, 0, f.dim}, 1, f.dim);
    mine.merge<Math>(0, {{f.block.acc + lane * f.dim, f.block.m + lane, f.block.l + lane}}, f.dim);
    mine.write(0, f.dim, f.dim, static_cast<T *>(f.out) + lane * f.dim, sink_of<Math>(f.sinks, lane % f.heads, m));
    if (f.lse) f.lse[lane] = log_sum(m, l, f.base2);
  });
}

template <typename Math> void merge_by(const MergePartials &f) {
  each_lane<Math>(f.lanes, f.dim, f.threads, [&](int64_t lane) { State{f.left}.merge<Math>(lane, {f.right}, f.dim); });
}

// e^(lse - top), and 0 for EMPTY: where both are, the difference is no number.
float weight(float lse, float top) { return lse == -__builtin_inff() ? 0.0f : exp(lse - top); }

void merge_lane(const MergeStates &s, int64_t lane) {
  const float left = s.left_lse[lane], right = s.right_lse[lane], top = left > right ? left : right;
  const float keep = weight(left, top), add = weight(right, top), sum = keep + add;
  for (int64_t d = 0; d < s.dim; d += W) {
    const int64_t at = lane * s.dim + d, n = s.dim - d;
    const vf both = madd(load_up_to(s.left_out + at, n), splat(keep), load_up_to(s.right_out + at, n) * splat(add));
    store_up_to(s.out + at, sum == 0.0f ? vf{} : both / splat(sum), n);
  }
  s.lse[lane] = sum == 0.0f ? -__builtin_inff() : static_cast<float>(top + __builtin_log(sum));
}

}  // namespace

template <typename T> void finish(const Finish &f) {
#ifdef __AVX512BF16__
  if (f.base2) return finish_by<Vnni, T>(f);
#endif
  finish_by<Plain<float>, T>(f);
}

void merge_partials(const MergePartials &f) {
#ifdef __AVX512BF16__
  if (f.base2) return merge_by<Vnni>(f);
#endif
  merge_by<Plain<float>>(f);
}

void merge_states(const MergeStates &s) {
  share_each(s.lanes, s.lanes * s.dim > WORTH_THREADS ? s.threads : 1, [&](int64_t lane) { merge_lane(s, lane); });
}

HEADRACE_BOTH_TYPES(finish, Finish)

}  // namespace headrace::HEADRACE_NS
