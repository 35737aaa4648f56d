// Arguments of layers that carry a state from row to row, sizes in elements.
//
// T: rows; Hk, Hv: key and value heads; D: key size; V: value size.
#pragma once

#include <cstdint>

namespace headrace {

// Rows row_begin .. row_end - 1 of a sequence, which begin with the state in slot `from` (-1: the state of no tokens) and leave
// theirs in slot `to`; both may be the same.
struct StateSegment {
  int64_t row_begin, row_end, from, to;
};

// Gated delta nets: gated_delta.cpp. C = 2 Hk D + Hv V channels, of queries, keys and values; K: inputs of the convolution.
// by_channel: Kimi Delta Attention, where each channel of a key decays by itself (Hk = Hv) and a sigmoid gates the output.
struct GatedDelta {
  static constexpr int64_t MOST_KEY_DIM = 256;

  const void *mixed;             // [T, C + Hv V] rows mixed_stride apart: the channels, and what gates the output
  const float *gates;            // [T, 2 Hv], or [T, Hv + Hv D] by channel: of beta, and of the decay
  const float *conv;             // [K, C]
  const float *rate, *dt_bias;   // [Hv] each; dt_bias [Hv D] by channel
  const float *norm;             // [V]
  void *last;                    // [slots, K - 1, C]: the convolution's last inputs, of the type of `mixed`
  float *matrices;               // [slots, Hv, D, V]
  const StateSegment *segments;  // [n], which take effect one after another
  void *out;                     // [T, Hv, V]; rows in no segment are left as they are
  int64_t rows, mixed_stride, segment_count, key_heads, value_heads, key_dim, value_dim, kernel;
  float eps;
  int threads;
  bool by_channel;
  float bound = 0.0f;  // by channel, below 0: a channel decays by e^(bound sigmoid(rate (gate + dt_bias)))

  int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }

  // The state of a value head in a slot, [D, V].
  float *matrix(int64_t slot, int64_t head) const { return matrices + (slot * value_heads + head) * key_dim * value_dim; }
};

// Mamba-2 layers: mamba2.cpp. C = Hv V + 2 Hk D channels, of x, keys and queries; K: inputs of the convolution.
struct Mamba2 {
  static constexpr int64_t MOST_KEY_DIM = 256;

  const void *mixed;                   // [T, Hv V + C] rows mixed_stride apart: what gates the output, and the channels
  const float *gates;                  // [T, Hv]: of the steps
  const float *conv, *conv_bias;       // [K, C], [C] or null
  const float *rate, *dt_bias, *skip;  // [Hv] each
  const float *norm;                   // [Hv V]; null: out is what it would be taken of, in fp32 unless it is to be `rounded`
  void *last;                          // [slots, K - 1, C]: the convolution's last inputs, of the type of `mixed`
  float *matrices;                     // [slots, Hv, D, V]
  const StateSegment *segments;        // [n], which take effect one after another
  void *out;                           // [T, Hv, V]; rows in no segment are left as they are
  int64_t rows, mixed_stride, segment_count, key_heads, value_heads, key_dim, value_dim, kernel;
  float eps;
  int threads;
  bool rounded = false;

  int64_t channels() const { return value_heads * value_dim + 2 * key_heads * key_dim; }

  // The state of a head in a slot, [D, V].
  float *matrix(int64_t slot, int64_t head) const { return matrices + (slot * value_heads + head) * key_dim * value_dim; }
};

// Short convolutions between two gates: short_conv.cpp. K: inputs of the convolution, H: channels.
struct ShortConv {
  static constexpr int64_t MOST_INPUTS = 8;

  const void *mixed;             // [T, 3 H] = (gates of what is convolved, gates of the output, x), rows mixed_stride apart
  const float *conv;             // [K, H]
  void *last;                    // [slots, K - 1, H]: the convolution's last inputs, of the type of `mixed`
  const StateSegment *segments;  // [n], which take effect one after another
  void *out;                     // [T, H]; rows in no segment are left as they are
  int64_t rows, mixed_stride, segment_count, channels, kernel;
  int threads;
};

}  // namespace headrace
