#include "model/experts.h"

#include <cstring>

#include "common/arena.h"
#include "common/shares.h"

namespace headrace {

using HEADRACE_NS::room;
using HEADRACE_NS::Scratch;

namespace {

constexpr int64_t MANY_ELEMENTS = 16384;  // copied: below, waking the other threads costs more than it saves

// Of T rows and `chosen` experts each: what the router says, the place of each pair of the two among the T chosen rows that are
// sorted by expert, these rows (later what becomes of them), and the MLP before and after its activation.
struct Buffers {
  float *logits, *share;
  int32_t *expert, *place;
  bf16 *sorted, *inner, *active;

  Buffers(const Experts &e, int64_t rows, void *memory) {
    Scratch scratch(memory);
    const int64_t all = rows * e.chosen;
    logits = scratch.take<float>(rows * e.router.outputs);
    share = scratch.take<float>(all);
    expert = scratch.take<int32_t>(all);
    place = scratch.take<int32_t>(all);
    sorted = scratch.take<bf16>(all * e.router.inputs);
    inner = scratch.take<bf16>(all * plain_width(e));
    active = scratch.take<bf16>(all * e.down.front().inputs);
  }

  static int64_t bytes(const Experts &e, int64_t rows) {
    const int64_t all = rows * e.chosen;
    return room<float>(rows * e.router.outputs) + room<float>(all) + 2 * room<int32_t>(all) +
           room<bf16>(all * e.router.inputs) + room<bf16>(all * plain_width(e)) + room<bf16>(all * e.down.front().inputs);
  }

  // Outputs before the activation, where that is no part of the product.
  static int64_t plain_width(const Experts &e) { return e.up.front().gated ? 0 : e.up.front().outputs; }
};

// Places by ascending expert, of one expert in the order of rows. Returns where each expert's begin, and behind the last the end.
std::vector<int64_t> sort_by_expert(const int32_t *expert, int64_t count, int64_t experts, int32_t *place) {
  std::vector<int64_t> begin(experts + 1);
  for (int64_t i = 0; i < count; ++i) ++begin[expert[i] + 1];
  for (int64_t e = 0; e < experts; ++e) begin[e + 1] += begin[e];
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  for (int64_t i = 0; i < count; ++i) place[i] = static_cast<int32_t>(next[expert[i]]++);
  return begin;
}

}  // namespace

int64_t experts_scratch(const Experts &experts, int64_t rows) { return Buffers::bytes(experts, rows); }

void add_experts(const Experts &e, Activation activation, const Operations &run, const bf16 *x, bf16 *y, void *scratch) {
  const int64_t hidden = e.router.inputs, experts = e.router.outputs, all = run.rows * e.chosen;
  const Buffers b(e, run.rows, scratch);
  run.multiply_wide(e.router, x, b.logits, nullptr);
  run.kernels.route({b.logits, b.expert, b.share, run.rows, experts, e.chosen, e.normalised, run.threads});
  const std::vector<int64_t> begin = sort_by_expert(b.expert, all, experts, b.place);
  HEADRACE_NS::share_each(all, all * hidden > MANY_ELEMENTS ? run.threads : 1, [&](int64_t i) {
    memcpy(b.sorted + b.place[i] * hidden, x + i / e.chosen * hidden, hidden * sizeof(bf16));
  });
  const Operations sorted = {run.kernels, all, run.threads};
  const bool gated = e.up.front().gated;
  sorted.multiply_groups(e.up, begin, activation, b.sorted, gated ? b.active : b.inner);
  if (!gated) sorted.activate(activation, b.inner, b.active, e.down.front().inputs);
  sorted.multiply_groups(e.down, begin, activation, b.active, b.sorted);
  run.kernels.combine[Operations::BF16]({b.sorted, b.place, b.share, y, y, run.rows, e.chosen, hidden, run.threads});
}

}  // namespace headrace
