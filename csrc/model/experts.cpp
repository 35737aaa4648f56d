#include "model/experts.h"

#include <sys/mman.h>

#include <cstring>

#include "common/arena.h"
#include "common/shares.h"

namespace headrace {

using HEADRACE_NS::room;
using HEADRACE_NS::Scratch;

namespace {

constexpr int64_t MANY_ELEMENTS = 16384;  // copied: below, waking the other threads costs more than it saves

// Of T rows and `chosen` experts each: what the router says, the place of each pair of the two among the T chosen rows that are
// sorted by expert, these rows (later what becomes of them), the MLP before and after its activation, and what the rows' experts
// make of them. Of the chosen rows which row each is, and its share, where these multiply them. Of the expert that all rows meet
// the same, its gates [T], and what it makes of the rows.
struct Buffers {
  float *logits, *share, *factor;
  int32_t *expert, *place, *row;
  bf16 *sorted, *inner, *active, *met;
  bf16 *shared_inner, *shared_active, *gate, *made;

  Buffers(const Experts &e, int64_t rows, void *memory) {
    Scratch scratch(memory);
    const int64_t all = rows * e.chosen;
    logits = scratch.take<float>(rows * e.router.outputs);
    share = scratch.take<float>(all);
    factor = scratch.take<float>(all);
    row = scratch.take<int32_t>(all);
    expert = scratch.take<int32_t>(all);
    place = scratch.take<int32_t>(all);
    sorted = scratch.take<bf16>(all * e.router.inputs);
    inner = scratch.take<bf16>(all * plain_width(e.up.front()));
    active = scratch.take<bf16>(all * e.down.front().inputs);
    met = scratch.take<bf16>(rows * e.router.inputs);
    if (e.shared.empty()) return;
    shared_inner = scratch.take<bf16>(rows * plain_width(e.shared[0]));
    shared_active = scratch.take<bf16>(rows * e.shared[1].inputs);
    gate = scratch.take<bf16>(rows);
    made = scratch.take<bf16>(rows * e.router.inputs);
  }

  static int64_t bytes(const Experts &e, int64_t rows) {
    const int64_t all = rows * e.chosen, hidden = e.router.inputs;
    const int64_t chosen = room<float>(rows * e.router.outputs) + 2 * room<float>(all) + 3 * room<int32_t>(all) +
                           room<bf16>(all * hidden) + room<bf16>(all * plain_width(e.up.front())) +
                           room<bf16>(all * e.down.front().inputs) + room<bf16>(rows * hidden);
    if (e.shared.empty()) return chosen;
    return chosen + room<bf16>(rows * plain_width(e.shared[0])) + room<bf16>(rows * e.shared[1].inputs) + room<bf16>(rows) +
           room<bf16>(rows * hidden);
  }

  // Outputs before the activation, where that is no part of the product.
  static int64_t plain_width(const Matrix &up) { return up.gated ? 0 : up.outputs; }
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

// Counts the experts that rows have chosen, and has the system read those that are not in memory, all at the same time.
void fetch(OutsideExpert *outside, const std::vector<int64_t> &begin) {
  for (size_t e = 0; e + 1 < begin.size(); ++e) {
    if (begin[e] == begin[e + 1]) continue;
    OutsideExpert &one = outside[e];
    ++one.met;
    if (one.kept) ++one.hits;
    else  // advice: a system that cannot follow it reads page by page
      madvise(reinterpret_cast<void *>(one.begin), one.size, MADV_WILLNEED);
  }
}

// b.made [T, H] times the sigmoid of each row's gate. b.sorted is of no use any more.
void gate_shared(const Matrix &gate, const Operations &run, const bf16 *x, const Buffers &b) {
  const int64_t hidden = gate.inputs;
  run.multiply(gate, x, b.gate);
  HEADRACE_NS::share_each(run.rows, run.rows * hidden > MANY_ELEMENTS ? run.threads : 1, [&](int64_t t) {
    for (int64_t i = 0; i < hidden; ++i) b.sorted[t * hidden + i] = b.gate[t];
  });
  run.let_through(b.sorted, hidden, b.made, hidden);
}

// met += what the expert that all rows meet makes of x, rounded.
void add_shared(const Experts &e, Activation f, const Operations &run, const bf16 *x, const Buffers &b, bf16 *met) {
  const Matrix &up = e.shared[0], &down = e.shared[1];
  run.multiply_activated(up, f, x, b.shared_inner, b.shared_active, down.inputs);
  run.multiply(down, b.shared_active, b.made);
  if (e.shared.size() > 2) gate_shared(e.shared[2], run, x, b);
  run.add(met, b.made, e.router.inputs);
}

// b.sorted = x [T, H] times the shares of its experts, a row for each pair, rounded once; shares become 1.
void weigh_inputs(const Experts &e, const Operations &run, const bf16 *x, const Buffers &b) {
  const int64_t all = run.rows * e.chosen;
  for (int64_t i = 0; i < all; ++i) {
    b.row[b.place[i]] = static_cast<int32_t>(i / e.chosen);
    b.factor[b.place[i]] = b.share[i];
  }
  run.kernels.combine[Operations::BF16]({x, b.row, b.factor, nullptr, b.sorted, all, 1, e.router.inputs, run.threads});
  for (int64_t i = 0; i < all; ++i) b.share[i] = 1.0f;
}

// b.expert and b.share: what the router says of rows [T, H].
void choose(const Experts &e, const Operations &run, const bf16 *routed, const Buffers &b) {
  run.multiply_wide(e.router, routed, b.logits, nullptr);
  run.kernels.route(
      {b.logits, b.expert, b.share, run.rows, e.router.outputs, e.chosen, e.normalised, run.threads, e.routing, e.correction});
  if (!e.scales) return;
  for (int64_t i = 0; i < run.rows * e.chosen; ++i) b.share[i] *= e.scales[b.expert[i]];
}

// met = y + what the experts make of x that have been chosen, y being none or met.
void meet_chosen(const Experts &e, Activation activation, const Operations &run, const bf16 *x, const Buffers &b, const bf16 *y,
                 bf16 *met) {
  const int64_t hidden = e.router.inputs, experts = e.router.outputs, all = run.rows * e.chosen;
  const std::vector<int64_t> begin = sort_by_expert(b.expert, all, experts, b.place);
  if (e.outside) fetch(e.outside, begin);
  if (e.weighted_inputs) weigh_inputs(e, run, x, b);
  else
    HEADRACE_NS::share_each(all, all * hidden > MANY_ELEMENTS ? run.threads : 1, [&](int64_t i) {
      memcpy(b.sorted + b.place[i] * hidden, x + i / e.chosen * hidden, hidden * sizeof(bf16));
    });
  const Operations sorted = {run.kernels, all, run.threads};
  const bool gated = e.up.front().gated;
  sorted.multiply_groups(e.up, begin, activation, b.sorted, gated ? b.active : b.inner);
  if (!gated) sorted.activate(activation, b.inner, b.active, e.down.front().inputs);
  sorted.multiply_groups(e.down, begin, activation, b.active, b.sorted);
  run.kernels.combine[Operations::BF16]({b.sorted, b.place, b.share, y, met, run.rows, e.chosen, hidden, run.threads});
}

}  // namespace

int64_t experts_scratch(const Experts &experts, int64_t rows) { return Buffers::bytes(experts, rows); }

void add_experts(const Experts &e, Activation activation, const Operations &run, const bf16 *x, bf16 *y, float scale,
                 void *scratch) {
  const Buffers b(e, run.rows, scratch);
  choose(e, run, x, b);
  if (e.shared.empty() && scale == 1.0f) return meet_chosen(e, activation, run, x, b, y, y);
  meet_chosen(e, activation, run, x, b, nullptr, b.met);
  if (!e.shared.empty()) add_shared(e, activation, run, x, b, b.met);
  run.add(y, b.met, e.router.inputs, scale);
}

void run_experts(const Experts &e, Activation activation, const Operations &run, const bf16 *x, bf16 *y, void *scratch,
                 const bf16 *routed) {
  const Buffers b(e, run.rows, scratch);
  choose(e, run, routed ? routed : x, b);
  meet_chosen(e, activation, run, x, b, nullptr, y);
  if (!e.shared.empty()) add_shared(e, activation, run, x, b, y);
}

}  // namespace headrace
