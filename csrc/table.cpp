// The kernels of one instruction set.
#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_NS {

template <typename T> void attend(const Attend &);
template <typename T> void append(const Append &);
template <typename T> void rms_norm(const Norm &);
template <typename T> void layer_norm(const Norm &);
template <typename T> void silu_mul(const Unary &);
template <typename T> void gelu(const Unary &);
template <typename T> void gelu_tanh(const Unary &);
template <typename T> void rotary(const Rotary &);
template <typename T> void linear_quant(const LinearQuant &);
void linear(const Linear &);
void exp_many(const float *x, float *out, int64_t n);

extern const Kernels kernels;
constexpr Kernels kernels = {
    {attend<bf16>, attend<float>},         {append<bf16>, append<float>},     {rms_norm<bf16>, rms_norm<float>},
    {layer_norm<bf16>, layer_norm<float>}, {silu_mul<bf16>, silu_mul<float>}, {gelu<bf16>, gelu<float>},
    {gelu_tanh<bf16>, gelu_tanh<float>},   {rotary<bf16>, rotary<float>},     {linear_quant<bf16>, linear_quant<float>},
#ifdef __AVX512BF16__
    linear,
#else
    nullptr,
#endif
    exp_many,
};

}  // namespace headrace::HEADRACE_NS
