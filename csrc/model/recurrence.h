// The recurrent layers of one engine step: which rows go from which state to which, and where the states lie.
#pragma once

#include <vector>

#include "common/checks.h"
#include "isa/dispatch.h"
#include "model/decoder_layer.h"

namespace headrace {

// States of all recurrent layers of a model that computes in bf16, `slots` each.
struct RecurrentStates {
  struct Layer {
    Borrowed<void> last;
    Borrowed<float> matrices;
  };

  std::vector<Layer> layers;
  int64_t slots;
};

// One step over them; its memory is the caller's.
struct Recurrence {
  const RecurrentStates &states;
  const DeltaSegment *segments;
  int64_t count;

  // The net of a layer, by its number among the recurrent ones: mixed [T, C + Hv V], gates [T, 2 Hv] -> out [T, Hv, V]. Throws for
  // segments that fit neither rows nor slots.
  void run(size_t layer, const DeltaNet &net, const bf16 *mixed, const float *gates, bf16 *out, int64_t rows,
           int threads) const {
    const RecurrentStates::Layer &own = states.layers.at(layer);
    GatedDelta a = {};
    a.mixed = mixed, a.gates = gates, a.out = out;
    a.conv = net.conv, a.rate = net.rate, a.dt_bias = net.dt_bias, a.norm = net.norm;
    a.last = own.last, a.matrices = own.matrices;
    a.segments = segments, a.segment_count = count;
    a.rows = rows;
    a.key_heads = net.key_heads, a.value_heads = net.value_heads;
    a.key_dim = net.key_dim, a.value_dim = net.value_dim, a.kernel = net.kernel;
    a.mixed_stride = a.channels() + net.value_heads * net.value_dim;
    a.eps = net.eps, a.threads = threads;
    check_segments(a, states.slots);
    kernels().gated_delta[0](a);
  }
};

}  // namespace headrace
