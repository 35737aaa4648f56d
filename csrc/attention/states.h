// Unnormalised softmax states of lanes, and how two of them merge: docs/attention.md. A lane is one (row, query head).
#pragma once

#include "attention/lanes.h"
#include "common/shares.h"

namespace headrace::HEADRACE_NS {

constexpr int64_t WORTH_THREADS = 16384;  // elements

// f(lane) for all lanes, each of which merges so many elements, in the mode in which attention merges blocks.
template <typename Math, typename F> void each_lane(int64_t lanes, int64_t elements, int threads, F f) {
  share_ranges(lanes, lanes * elements > WORTH_THREADS ? threads : 1, [&](int64_t first, int64_t end) {
    [[maybe_unused]] const typename Math::template Tiny<false> kept;
    for (int64_t lane = first; lane < end; ++lane) f(lane);
  });
}

// What the sink of a head adds to the l of a lane whose greatest score is m, in the unit of Math.
template <typename Math> float sink_of(const float *sinks, int64_t head, float m) {
  return sinks ? Math::power(splat(Math::unit(sinks[head]) - m))[0] : 0.0f;
}

// acc [lanes, stride], m and l [lanes]. EMPTY is (0, -inf, 0).
struct State : Partial {
  void clear(int64_t lane, int64_t stride) {
    for (int64_t d = 0; d < stride; ++d) acc[lane * stride + d] = 0.0f;
    m[lane] = -__builtin_inff();
    l[lane] = 0.0f;
  }

  // Merges partial states (their m and l; acc follows by the weights) into `n` lanes. A state with l = 0 changes nothing.
  template <typename Math> void take(int64_t lane, int n, const float *m_new, const float *l_new, Weights &weights) {
    for (int r = 0; r < n; r += W) {
      const int count = n - r < W ? n - r : W;
      const vf old = load_part(m + lane + r, count), part = load_part(m_new + r, count);
      const vf l_old = load_part(l + lane + r, count), l_part = load_part(l_new + r, count);
      const vf low = splat(-__builtin_inff());
      const vf mine = l_old > 0.0f ? old : low, theirs = l_part > 0.0f ? part : low;
      const vf top = max(mine, theirs);
      const vf base = top == low ? vf{} : top;
      const vf keep = Math::power(mine - base), add = Math::power(theirs - base);
      store_part(l + lane + r, madd(l_old, keep, l_part * add), count);
      store_part(m + lane + r, top, count);
      store(weights.keep + r, keep);
      store(weights.take + r, add);
    }
  }

  // Merges the same lanes of `part` into `n` <= LANES of these.
  template <typename Math> void merge(int64_t lane, const State &part, int64_t stride, int n = 1) {
    Weights w;
    take<Math>(lane, n, part.m + lane, part.l + lane, w);
    for (int r = 0; r < n; ++r) {
      if (part.l[lane + r] == 0.0f) continue;
      const vf keep = splat(w.keep[r]), add = splat(w.take[r]);
      float *to = acc + (lane + r) * stride;
      const float *from = part.acc + (lane + r) * stride;
      for (int64_t d = 0; d < stride; d += W) {
        const int64_t left = stride - d;
        store_up_to(to + d, madd(load_up_to(to + d, left), keep, load_up_to(from + d, left) * add), left);
      }
    }
  }

  // acc / (l + more), 0 where no key was seen. more: of a sink.
  template <typename T> void write(int64_t lane, int64_t stride, int64_t dim, T *out, float more) const {
    const vf inverse = l[lane] == 0.0f ? vf{} : splat(1.0f) / splat(l[lane] + more);
    for (int64_t d = 0; d < dim; d += W) store_up_to(out + d, load_up_to(acc + lane * stride + d, dim - d) * inverse, dim - d);
  }
};

// Lanes of a state, from `lane` on, whose accumulators are `stride` apart.
struct Lanes {
  Partial parts;
  int64_t lane, stride;

  void copy_to(const Lanes &to, int64_t lanes, int64_t dim) const {
    for (int64_t i = 0; i < lanes; ++i)
      memcpy(to.parts.acc + (to.lane + i) * to.stride, parts.acc + (lane + i) * stride, dim * sizeof(float));
    memcpy(to.parts.m + to.lane, parts.m + lane, lanes * sizeof(float));
    memcpy(to.parts.l + to.lane, parts.l + lane, lanes * sizeof(float));
  }
};

}  // namespace headrace::HEADRACE_NS
