// A decoder layer but for its attention or recurrence: all that comes before it, and all that comes after, each in one call.
// In bf16. It composes the kernels in use and has no arithmetic of its own: the bits are those of single operations.
//
// T: rows; H: hidden size; Hq, Hkv: query and KV heads; D: head size; I: MLP width.
#pragma once

#include <optional>
#include <vector>

#include "kernels.h"
#include "model/borrowed.h"
#include "model/matrix.h"

namespace headrace {

enum class Order { pre, post, parallel, sandwich, after };  // models.spec.Block
#define HEADRACE_NAME(name) name,
enum class Activation { HEADRACE_ACTIVATIONS(HEADRACE_NAME) };
#undef HEADRACE_NAME

// The vectors of a norm, each may be null. offset: is added to the weights of an RMS norm.
struct Scale {
  bool rms;
  Borrowed<const bf16> weight, bias;
  float offset;
};

// An expert whose weights lie in a mapped file: steps that met it, those that found it kept in memory, whether it is kept now, and
// where it lies, in whole pages. One row of kernels.experts.OutsideTable, whose owner sets `kept` while steps count.
struct OutsideExpert {
  int64_t met, hits, kept, begin, size;
};

// The MLP of a layer with experts, each of its own `up` and `down`, of which a row meets `chosen`. No experts: a dense MLP.
struct Experts {
  Matrix router;
  std::vector<Matrix> up, down;
  int64_t chosen;
  bool normalised;  // as in Route, and so the next two
  Routing routing;
  Borrowed<const float> correction;
  Borrowed<const float> scales;     // of each expert, by which shares are multiplied; or null
  bool weighted_inputs;             // shares multiply what enters experts, not what they make
  std::vector<Matrix> shared;       // up, down and maybe a gate [1, H] of the expert that all rows meet; or none
  Borrowed<OutsideExpert> outside;  // of each expert; null: all lie in memory
};

// A gated delta net in the place of attention (GatedDelta): what its rows are made by but `mixed`, which is the layer's qkv.
struct DeltaNet {
  Matrix gates;
  Borrowed<const float> conv, rate, dt_bias, norm;
  int64_t key_heads, value_heads, key_dim, value_dim, kernel;
  float eps;
};

// A Mamba-2 layer in the place of attention (Mamba2): what its rows are made by but `mixed`, which is the layer's qkv.
struct MambaNet {
  Matrix gates;
  Borrowed<const float> conv, conv_bias, rate, dt_bias, skip, norm;
  int64_t key_heads, value_heads, key_dim, value_dim, kernel;
  float eps;
};

// A short convolution in the place of attention (ShortConv); `mixed` is the layer's qkv.
struct ShortConvolution {
  Borrowed<const float> conv;
  int64_t channels, kernel;
};

// A recurrent layer beside attention, of the same rows (models/side_by_side.py): what makes its channels, and what is made of it.
// The factors are models.layer_parts.Multipliers but for those of channels, which the filter has; gates: of its steps, up: of the
// half that gates, out, up and down: of the layer's own matrices.
struct Beside {
  Matrix mixed, out;
  struct {
    float z, gates, out, recurrent_out, up, down;
  } times;
};

// What enters a layer beside its residual stream (models.layer_parts.LayerInputs): rows of P numbers, which the stream gates.
struct LayerInputs {
  Matrix gate, out;
  Scale norm;
};

// What rows of these begin with, and how far apart they lie. None: null.
struct InputRows {
  const bf16 *at = nullptr;
  int64_t stride = 0;
};

// Experts beside a dense MLP, of the same rows: what the router reads, normed, is multiplied by `factor`; what each half makes is
// normed before they are added.
struct BesideMlp {
  Scale router_norm, experts_norm, dense_out_norm, experts_out_norm;
  float factor;
};

// Latent attention (models/latent.py) over one KV head of `dim` numbers, those that are rotated and a latent [rank] behind them,
// which the layer's qkv makes of x. Queries come apart: each head's plain part goes through `keys` [rank, plain] of its own. What
// it attends to is a latent again, and goes through its `values` [value, rank].
struct Latent {
  std::optional<Matrix> query_in;  // queries are made of this one's outputs, normed; else of x
  Matrix queries;                  // of each head the rotated part, then the plain one
  std::vector<Matrix> keys, values;
  Borrowed<const bf16> query_norm, latent_norm;
  float eps;
};

// Of rows whose attention is let through by the sigmoid of gates [T, Hq, D]: rows `stride` apart. None: by nothing.
struct AttentionGates {
  const bf16 *at = nullptr;
  int64_t stride = 0;
};

struct DecoderLayer {
  Order order;
  Activation activation;
  Borrowed<const float> alphas;  // of xielu
  int64_t heads, kv_heads, dim;
  float eps;
  Matrix qkv, out, up, down;  // with experts, up and down are the first one's; without an MLP they have no outputs
  Experts experts;
  Scale attention_norm, mlp_norm;
  Scale attention_out_norm, mlp_out_norm;  // of Order::sandwich and after alone
  float out_eps;                           // theirs
  Borrowed<const bf16> q_norm, k_norm;     // null where queries and keys are not normed
  Borrowed<const bf16> v_norm;             // the same of values
  bool keys_as_values;                     // values are the keys as they are projected, which qkv makes once
  bool norm_whole;                         // they are normed over all heads together, not [D] each
  int64_t turn_first, turned;              // where the layer's rotation begins in a row of cos_sin, and its width; 0: none
  int64_t query_first;                     // where that of queries begins, which is as wide
  bool turn_before_norm;                   // queries and keys are rotated, then normed
  float residual_scale;                    // of what is added to the residual stream, of Order::pre, sandwich and after
  bool gated;                              // attention is let through by gates, which qkv has behind q, k and v
  std::optional<DeltaNet> net;
  std::optional<MambaNet> mamba;
  std::optional<ShortConvolution> convolution;
  std::optional<Latent> latent;
  std::optional<Beside> beside;
  std::optional<BesideMlp> beside_mlp;
  std::optional<LayerInputs> inputs;
  float scale;  // of what leaves the layer, of Order::sandwich

  // Whether it needs the states of its rows (Recurrence), and whether it has attention.
  bool recurrent() const { return net || mamba || convolution; }
  bool attends() const { return !recurrent() || beside; }

  // What makes the rows of a recurrent layer.
  const Matrix &mixed() const { return beside ? beside->mixed : qkv; }

  // What makes the fp32 gates of its rows; null: it has none.
  const Matrix *gates() const { return net ? &net->gates : mamba ? &mamba->gates : nullptr; }

  // Elements of scratch memory that either call needs for `rows` rows.
  int64_t scratch(int64_t rows) const;

  // Of how many adapters its matrices may have something; all of them know of the same.
  int64_t adapters() const;

  // Elements that `before` leaves of `rows` rows, and of one of them: how far apart rows of q, k and v lie.
  int64_t mixed_size(int64_t rows) const;
  int64_t mixed_width() const {
    return latent ? (heads + kv_heads) * dim : qkv.outputs + (keys_as_values ? kv_heads * dim : 0);
  }

  // Where among them the rows of a recurrent layer begin, and its gates, [T, 2 Hv] fp32 of a net, [T, Hv] of a Mamba-2 layer.
  int64_t mixed_at(int64_t rows) const;
  int64_t gates_at(int64_t rows) const;

  // Elements of a row of attention that `after` takes, or of a recurrent layer that has its place; all of them, and where among
  // them those of a recurrent layer begin.
  int64_t attended_width() const { return latent ? heads * dim : out.inputs; }
  int64_t attended_size(int64_t rows) const;
  int64_t recurred_at(int64_t rows) const;

  // x [T, H] -> qkv [T, Hq + 2 Hkv, D] = (q, k, v), and Hq gates behind them if there are any; of a recurrent layer `mixed`, and a
  // net's gates, in their place or behind them; of latents [T, Hq + 1, D] = (q, k), whose k is v too.
  // cos_sin [T, rotary] fp32, of all layers, or null: nothing is rotated. adapted [T]: the number of each row's adapter, -1 for
  // none; or null, no row has one.
  void before(const bf16 *x, const float *cos_sin, int64_t rotary, bf16 *qkv, bf16 *scratch, int64_t rows, int threads,
              const int64_t *adapted = nullptr) const;

  // attended [T, Hq, D], overwritten where there are gates, or what a recurrent layer has made, or both; x [T, H] becomes the layer's output. own: its inputs, if it has some.
  void after(bf16 *x, bf16 *attended, bf16 *scratch, int64_t rows, int threads, AttentionGates gates = {},
             const int64_t *adapted = nullptr, InputRows own = {}) const;
};

}  // namespace headrace
