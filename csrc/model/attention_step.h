// Attention of one engine step: append and attend in one call for each layer. What the layers share is checked once.
#pragma once

#include <vector>

#include "common/checks.h"
#include "isa/dispatch.h"
#include "model/borrowed.h"

namespace headrace {

class AttentionStep {
 public:
  // Of `attend` and `append`, all but what a layer brings. The memory behind them is borrowed, but positions and offsets are
  // copied.
  AttentionStep(int type, const Attend &attend, const Append &append, int64_t slots)
      : type(type), slots(slots), shared(attend), places(append) {
    go_on(attend.positions, append.offsets, attend.threads);
  }

  AttentionStep(const AttentionStep &) = delete;

  // The items, borrowed, of layers with this window (0: none); how `run` is to call them.
  int64_t add_items(const Item *items, int64_t count, int64_t window) {
    Attend a = shared;
    a.items = items;
    a.item_count = count;
    a.window = window;
    check_items(a, slots);
    kinds.push_back(a);
    return static_cast<int64_t>(kinds.size()) - 1;
  }

  // The same items for rows at other positions. Throws, with nothing changed, for those that do not fit.
  void go_on(const int64_t *positions, const int32_t *offsets, int threads) {
    Attend attend = shared;
    Append append = places;
    attend.positions = positions;
    append.offsets = offsets;
    check_bias(attend);
    check_places(append, slots);
    own_positions.assign(positions, positions + shared.rows);
    own_offsets.assign(offsets, offsets + shared.rows);
    shared.positions = own_positions.data();
    places.offsets = own_offsets.data();
    shared.threads = places.threads = threads;
    for (Attend &kind : kinds) {
      kind.positions = shared.positions;
      kind.threads = threads;
    }
  }

  // Every row at its next position, in the chunk in which it is. Throws, with nothing changed, where a chunk is full.
  void go_on(int threads) {
    std::vector<int64_t> positions = own_positions;
    std::vector<int32_t> offsets = own_offsets;
    for (int64_t &each : positions) ++each;
    for (int32_t &each : offsets) ++each;
    go_on(positions.data(), offsets.data(), threads);
  }

  const int64_t *positions() const { return shared.positions; }
  int64_t rows() const { return shared.rows; }

  struct Rows {
    void *at;
    int64_t stride;
  };

  // What a layer brings: its step, the kind of its items there, its pools, and its sinks [Hq] or null. stores: it has keys and
  // values of its own; else those of another are in the pools.
  struct Layer {
    Borrowed<const AttentionStep> step;
    int64_t kind;
    Borrowed<void> k_pool, v_pool;
    Borrowed<const float> sinks;
    bool stores;

    void run(Rows q, Rows k, Rows v, void *out) const {
      const AttentionStep *own = step;
      own->run(*this, q, k, v, out);
    }
  };

  void run(const Layer &layer, Rows q, Rows k, Rows v, void *out) const {
    if (layer.stores) append(layer, k, v);
    Attend attend = kinds.at(layer.kind);
    attend.q = q.at, attend.q_stride = q.stride;
    attend.k = layer.k_pool, attend.v = layer.v_pool, attend.out = out;
    attend.sinks = layer.sinks;
    kernels().attend[type](attend);
  }

 private:
  void append(const Layer &layer, Rows k, Rows v) const {
    Append append = places;
    append.k_new = k.at, append.k_stride = k.stride, append.k = layer.k_pool;
    append.v_new = v.at, append.v_stride = v.stride, append.v = layer.v_pool;
    kernels().append[type](append);
  }

  int type;
  int64_t slots;
  Attend shared;
  Append places;
  std::vector<Attend> kinds;
  std::vector<int64_t> own_positions;
  std::vector<int32_t> own_offsets;
};

}  // namespace headrace
