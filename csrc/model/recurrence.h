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
  const StateSegment *segments;
  int64_t count;

  // A recurrent layer, by its number among them: what its `before` has `left` -> out [T, Hv, V], or [T, H]. Throws for segments
  // that fit neither rows nor slots.
  void run(size_t number, const DecoderLayer &layer, const bf16 *left, bf16 *out, int64_t rows, int threads) const {
    const RecurrentStates::Layer &own = states.layers.at(number);
    const bf16 *const mixed = left + layer.mixed_at(rows);
    if (layer.convolution) return convolve(own, *layer.convolution, mixed, out, rows, threads);
    const float *const gates = reinterpret_cast<const float *>(left + layer.gates_at(rows));
    if (layer.mamba) return run_mamba(own, *layer.mamba, mixed, gates, out, rows, threads);
    run_net(own, *layer.net, mixed, gates, out, rows, threads);
  }

 private:
  // mixed [T, C + Hv V], gates [T, 2 Hv].
  void run_net(const RecurrentStates::Layer &own, const DeltaNet &net, const bf16 *mixed, const float *gates, bf16 *out,
               int64_t rows, int threads) const {
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

  // mixed [T, Hv V + C], gates [T, Hv].
  void run_mamba(const RecurrentStates::Layer &own, const MambaNet &net, const bf16 *mixed, const float *gates, bf16 *out,
                 int64_t rows, int threads) const {
    Mamba2 a = {};
    a.mixed = mixed, a.gates = gates, a.out = out;
    a.conv = net.conv, a.conv_bias = net.conv_bias;
    a.rate = net.rate, a.dt_bias = net.dt_bias, a.skip = net.skip, a.norm = net.norm;
    a.last = own.last, a.matrices = own.matrices;
    a.segments = segments, a.segment_count = count;
    a.rows = rows;
    a.key_heads = net.key_heads, a.value_heads = net.value_heads;
    a.key_dim = net.key_dim, a.value_dim = net.value_dim, a.kernel = net.kernel;
    a.mixed_stride = net.value_heads * net.value_dim + a.channels();
    a.eps = net.eps, a.threads = threads, a.rounded = true;
    check_segments(a, states.slots);
    kernels().mamba2[0](a);
  }

  // mixed [T, 3 H].
  void convolve(const RecurrentStates::Layer &own, const ShortConvolution &layer, const bf16 *mixed, bf16 *out, int64_t rows,
                int threads) const {
    ShortConv a = {};
    a.mixed = mixed, a.out = out, a.conv = layer.conv, a.last = own.last;
    a.segments = segments, a.segment_count = count;
    a.rows = rows, a.mixed_stride = 3 * layer.channels;
    a.channels = layer.channels, a.kernel = layer.kernel;
    a.threads = threads;
    check_segments(a, states.slots);
    kernels().short_conv[0](a);
  }
};

}  // namespace headrace
