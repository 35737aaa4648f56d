// Python binding: tensors come as addresses, because that costs a tenth of a DLPack exchange. headrace.kernels.cpu
// checks shapes, types and layouts before it calls; nothing here is public.
#include <nanobind/nanobind.h>

#include "checks.h"
#include "dispatch.h"

namespace nb = nanobind;
using namespace headrace;

namespace {

using Address = uint64_t;

template <typename T> T *at(Address address) { return reinterpret_cast<T *>(address); }

void attend(int type, Address q, Address k, Address v, Address out, Address items, Address positions, Address bias,
            int64_t rows, int64_t q_stride, int64_t item_count, int64_t heads, int64_t kv_heads, int64_t dim,
            int64_t slots, int64_t window, int64_t bias_len, float scale, int threads) {
  const Attend a = {at<void>(q), at<void>(k), at<void>(v), at<void>(out), at<Item>(items), at<int64_t>(positions),
                    at<float>(bias), rows, q_stride, item_count, heads, kv_heads, dim, window, bias_len, scale,
                    threads};
  check_items(a, slots);
  check_bias(a);
  kernels().attend[type](a);
}

void append(int type, Address k_new, Address v_new, Address k, Address v, Address slots, Address offsets, int64_t rows,
            int64_t k_stride, int64_t v_stride, int64_t kv_heads, int64_t dim, int64_t slot_count, int threads) {
  const Append a = {at<void>(k_new), at<void>(v_new), at<void>(k), at<void>(v), at<int32_t>(slots),
                    at<int32_t>(offsets), rows, k_stride, v_stride, kv_heads, dim, threads};
  check_places(a, slot_count);
  kernels().append[type](a);
}

void rms_norm(int type, Address x, Address weight, Address out, int64_t rows, int64_t width, float eps,
              int threads) {
  kernels().rms_norm[type]({at<void>(x), at<void>(weight), nullptr, at<void>(out), rows, width, eps, threads});
}

void layer_norm(int type, Address x, Address weight, Address bias, Address out, int64_t rows, int64_t width,
                float eps, int threads) {
  kernels().layer_norm[type](
      {at<void>(x), at<void>(weight), at<void>(bias), at<void>(out), rows, width, eps, threads});
}

void silu_mul(int type, Address x, Address out, int64_t rows, int64_t width, int threads) {
  kernels().silu_mul[type]({at<void>(x), at<void>(out), rows, width, threads});
}

void gelu(int type, bool tanh, Address x, Address out, int64_t elements, int threads) {
  const auto &op = tanh ? kernels().gelu_tanh : kernels().gelu;
  op[type]({at<void>(x), at<void>(out), 1, elements, threads});
}

void rotary(int type, Address x, Address out, Address cos_sin, int64_t rows, int64_t x_stride, int64_t heads,
            int64_t dim, int64_t width, int threads) {
  kernels().rotary[type](
      {at<void>(x), at<void>(out), at<float>(cos_sin), rows, x_stride, heads, dim, width, threads});
}

void linear(Address x, Address w, Address bias, Address out, int64_t rows, int64_t x_stride, int64_t inputs,
            int64_t outputs, bool wide, int threads) {
  kernels().linear({at<void>(x), at<void>(w), at<void>(bias), at<void>(out), rows, x_stride, inputs, outputs, wide,
                    threads});
}

void linear_quant(int type, int bits, Address x, Address codes, Address scales, Address bias, Address out, int64_t rows,
                  int64_t x_stride, int64_t inputs, int64_t outputs, bool wide, int threads) {
  kernels().linear_quant[type]({at<void>(x), at<void>(codes), at<void>(scales), at<void>(bias), at<void>(out), rows,
                                x_stride, inputs, outputs, bits, wide, threads});
}

bool has_linear() { return kernels().linear != nullptr; }

void exp_many(Address x, Address out, int64_t n) { kernels().exp(at<float>(x), at<float>(out), n); }

}  // namespace

NB_MODULE(_cpu, m) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  m.def("attend", attend, unlocked);
  m.def("append", append, unlocked);
  m.def("rms_norm", rms_norm, unlocked);
  m.def("layer_norm", layer_norm, unlocked);
  m.def("silu_mul", silu_mul, unlocked);
  m.def("gelu", gelu, unlocked);
  m.def("rotary", rotary, unlocked);
  m.def("linear", linear, unlocked);
  m.def("linear_quant", linear_quant, unlocked);
  m.def("has_linear", has_linear);
  m.def("exp", exp_many, unlocked);
  m.def("available_isas", available_isas);
  m.def("isa", isa);
  m.def("use_isa", use_isa);
#ifdef _OPENMP
  m.attr("openmp") = true;
#else
  m.attr("openmp") = false;
#endif
}
