// Operations of rows: norms, activations, rotations, what is found among them.
#include <nanobind/stl/vector.h>

#include "binding/binding.h"

namespace headrace {

namespace {

void rms_norm(int type, Address x, Address weight, Address out, int64_t rows, int64_t width, float eps, float offset,
              int threads) {
  kernels().rms_norm[type](
      {at<void>(x), at<void>(weight), nullptr, at<void>(out), rows, width, 1, width, eps, threads, offset});
}

// vectors: conv, rate, dt_bias and norm. states: last and matrices, of so many slots.
void gated_delta(int type, Address mixed, Address gates, const Addresses &vectors, const Addresses &states, Address segments,
                 Address out, int64_t rows, int64_t mixed_stride, int64_t count, int64_t slots, int64_t key_heads,
                 int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t kernel, float eps, int threads,
                 bool by_channel, float bound) {
  const GatedDelta a = {
      .mixed = at<void>(mixed),
      .gates = at<float>(gates),
      .conv = at<float>(vectors.at(0)),
      .rate = at<float>(vectors.at(1)),
      .dt_bias = at<float>(vectors.at(2)),
      .norm = at<float>(vectors.at(3)),
      .last = at<void>(states.at(0)),
      .matrices = at<float>(states.at(1)),
      .segments = at<StateSegment>(segments),
      .out = at<void>(out),
      .rows = rows,
      .mixed_stride = mixed_stride,
      .segment_count = count,
      .key_heads = key_heads,
      .value_heads = value_heads,
      .key_dim = key_dim,
      .value_dim = value_dim,
      .kernel = kernel,
      .eps = eps,
      .threads = threads,
      .by_channel = by_channel,
      .bound = bound,
  };
  check_segments(a, slots);
  kernels().gated_delta[type](a);
}

// vectors: conv, its bias or 0, rate, dt_bias, skip and norm. states: as of gated_delta.
void mamba2(int type, Address mixed, Address gates, const Addresses &vectors, const Addresses &states, Address segments,
            Address out, int64_t rows, int64_t mixed_stride, int64_t count, int64_t slots, int64_t key_heads,
            int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t kernel, float eps, int threads) {
  const Mamba2 a = {
      .mixed = at<void>(mixed),
      .gates = at<float>(gates),
      .conv = at<float>(vectors.at(0)),
      .conv_bias = at<float>(vectors.at(1)),
      .rate = at<float>(vectors.at(2)),
      .dt_bias = at<float>(vectors.at(3)),
      .skip = at<float>(vectors.at(4)),
      .norm = at<float>(vectors.at(5)),
      .last = at<void>(states.at(0)),
      .matrices = at<float>(states.at(1)),
      .segments = at<StateSegment>(segments),
      .out = at<void>(out),
      .rows = rows,
      .mixed_stride = mixed_stride,
      .segment_count = count,
      .key_heads = key_heads,
      .value_heads = value_heads,
      .key_dim = key_dim,
      .value_dim = value_dim,
      .kernel = kernel,
      .eps = eps,
      .threads = threads,
  };
  check_segments(a, slots);
  kernels().mamba2[type](a);
}

void short_conv(int type, Address mixed, Address conv, Address last, Address segments, Address out, int64_t rows,
                int64_t mixed_stride, int64_t count, int64_t slots, int64_t channels, int64_t kernel, int threads) {
  const ShortConv a = {
      .mixed = at<void>(mixed),
      .conv = at<float>(conv),
      .last = at<void>(last),
      .segments = at<StateSegment>(segments),
      .out = at<void>(out),
      .rows = rows,
      .mixed_stride = mixed_stride,
      .segment_count = count,
      .channels = channels,
      .kernel = kernel,
      .threads = threads,
  };
  check_segments(a, slots);
  kernels().short_conv[type](a);
}

void layer_norm(int type, Address x, Address weight, Address bias, Address out, int64_t rows, int64_t width, float eps,
                int threads) {
  kernels().layer_norm[type](
      {at<void>(x), at<void>(weight), at<void>(bias), at<void>(out), rows, width, 1, width, eps, threads});
}

template <auto operation>
void activate(int type, Address x, Address out, int64_t rows, int64_t width, int threads, Address alphas) {
  (kernels().*operation)[type]({at<void>(x), at<void>(out), rows, width, threads, at<void>(alphas)});
}

void rotary(int type, Address x, Address cos_sin, Address out, int64_t rows, int64_t x_stride, int64_t heads, int64_t dim,
            int64_t width, int64_t turn_stride, int threads) {
  kernels().rotary[type](
      {at<void>(x), at<void>(out), at<float>(cos_sin), rows, x_stride, heads * dim, heads, dim, width, turn_stride, threads});
}

// post: 0 where nothing is added any more; comb: 0 where streams do not mix.
void collect_streams(int type, Address x, const Addresses &mixing, Address out, Address post, Address comb, int64_t rows,
                     int64_t streams, int64_t width, float eps, float least, float magnitude, float post_least, int rounds,
                     int threads) {
  if (streams < 1 || streams > MOST_STREAMS) throw std::invalid_argument("1 to 8 streams are taken");
  kernels().collect_streams[type]({
      .x = at<void>(x),
      .mixes = at<float>(mixing.at(0)),
      .base = at<float>(mixing.at(1)),
      .scale = at<float>(mixing.at(2)),
      .out = at<void>(out),
      .post = at<float>(post),
      .comb = at<float>(comb),
      .rows = rows,
      .streams = streams,
      .width = width,
      .eps = eps,
      .least = least,
      .magnitude = magnitude,
      .post_least = post_least,
      .rounds = rounds,
      .threads = threads,
  });
}

void spread_streams(int type, Address x, Address part, Address post, Address comb, Address out, int64_t rows, int64_t streams,
                    int64_t width, int threads) {
  if (streams < 1 || streams > MOST_STREAMS) throw std::invalid_argument("1 to 8 streams are taken");
  kernels().spread_streams[type](
      {at<void>(x), at<void>(part), at<float>(post), at<float>(comb), at<void>(out), rows, streams, width, threads});
}

void soft_cap(Address x, int64_t n, float scale, float cap, int threads) {
  kernels().soft_cap(at<float>(x), n, scale, cap, threads);
}

void greatest(Address x, Address value, Address index, int64_t rows, int64_t width, int threads) {
  kernels().greatest({at<float>(x), at<float>(value), at<int64_t>(index), rows, width, threads, nullptr});
}

void softmax_sums(Address x, Address target, Address greatest, Address sum, Address above, int64_t rows, int64_t width,
                  int threads) {
  kernels().softmax_sums(
      {at<float>(x), at<int64_t>(target), at<float>(greatest), at<double>(sum), at<int64_t>(above), rows, width, threads});
}

}  // namespace

void bind_rows(nb::module_ &m) {
  m.def("rms_norm", rms_norm, unlocked, "type"_a, "x"_a, "weight"_a, "out"_a, named, "rows"_a, "width"_a, "eps"_a, "offset"_a,
        "threads"_a);
  m.def("gated_delta", gated_delta, unlocked, "type"_a, "mixed"_a, "gates"_a, "vectors"_a, "states"_a, "segments"_a, "out"_a,
        named, "rows"_a, "mixed_stride"_a, "count"_a, "slots"_a, "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a,
        "kernel"_a, "eps"_a, "threads"_a, "by_channel"_a, "bound"_a);
  m.def("mamba2", mamba2, unlocked, "type"_a, "mixed"_a, "gates"_a, "vectors"_a, "states"_a, "segments"_a, "out"_a, named,
        "rows"_a, "mixed_stride"_a, "count"_a, "slots"_a, "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a,
        "kernel"_a, "eps"_a, "threads"_a);
  m.def("short_conv", short_conv, unlocked, "type"_a, "mixed"_a, "conv"_a, "last"_a, "segments"_a, "out"_a, named, "rows"_a,
        "mixed_stride"_a, "count"_a, "slots"_a, "channels"_a, "kernel"_a, "threads"_a);
  m.def("layer_norm", layer_norm, unlocked, "type"_a, "x"_a, "weight"_a, "bias"_a, "out"_a, named, "rows"_a, "width"_a, "eps"_a,
        "threads"_a);
  m.def("collect_streams", collect_streams, unlocked, "type"_a, "x"_a, "mixing"_a, "out"_a, "post"_a, "comb"_a, named, "rows"_a,
        "streams"_a, "width"_a, "eps"_a, "least"_a, "magnitude"_a, "post_least"_a, "rounds"_a, "threads"_a);
  m.def("spread_streams", spread_streams, unlocked, "type"_a, "x"_a, "part"_a, "post"_a, "comb"_a, "out"_a, named, "rows"_a,
        "streams"_a, "width"_a, "threads"_a);
  m.def("rotary", rotary, unlocked, "type"_a, "x"_a, "cos_sin"_a, "out"_a, named, "rows"_a, "x_stride"_a, "heads"_a, "dim"_a,
        "width"_a, "turn_stride"_a, "threads"_a);
  m.def("soft_cap", soft_cap, unlocked);
  m.def("greatest", greatest, unlocked);
  m.def("softmax_sums", softmax_sums, unlocked);
  nb::enum_<Activation> activations(m, "Activation");
#define HEADRACE_DEFINE(name)                        \
  activations.value(#name, Activation::name);        \
  m.def(#name, activate<&Kernels::name>, unlocked, "type"_a, "x"_a, "out"_a, "rows"_a, "width"_a, "threads"_a, "alphas"_a = 0);
  HEADRACE_ACTIVATIONS(HEADRACE_DEFINE)
#undef HEADRACE_DEFINE
}

}  // namespace headrace
