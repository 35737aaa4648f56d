// The kernels of one instruction set.
#include "isa/lent.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

template <typename T> void attend(const Attend &);
template <typename T> void append(const Append &);
template <typename T> void finish(const Finish &);
void merge_partials(const MergePartials &);
void merge_states(const MergeStates &);
template <typename T> void rms_norm(const Norm &);
template <typename T> void layer_norm(const Norm &);
template <typename T> void silu_mul(const Unary &);
template <typename T> void gelu(const Unary &);
template <typename T> void gelu_tanh(const Unary &);
template <typename T> void relu(const Unary &);
template <typename T> void add(const Sum &);
template <typename T> void rotary(const Rotary &);
template <typename T> void linear_quant(const LinearQuant &);
#ifndef HEADRACE_PLAIN_OF
template <typename T> void linear_plain(const Linear &);
#endif
void linear_pairs(const Linear &);
void greatest(const Greatest &);
void store_chunks(const Stored &);
void load_chunks(const Stored &);
void exp_many(const float *x, float *out, int64_t n);
uint32_t probe_read(const void *from, int64_t bytes, int threads);
int64_t probe_multiply(int64_t rounds, int threads);

extern const Kernels kernels;
constexpr Kernels kernels = {
    {attend<bf16>, attend<float>},
    {append<bf16>, append<float>},
    {finish<bf16>, finish<float>},
    merge_partials,
    merge_states,
    {rms_norm<bf16>, rms_norm<float>},
    {layer_norm<bf16>, layer_norm<float>},
    {silu_mul<bf16>, silu_mul<float>},
    {gelu<bf16>, gelu<float>},
    {gelu_tanh<bf16>, gelu_tanh<float>},
    {relu<bf16>, relu<float>},
    {add<bf16>, add<float>},
    {rotary<bf16>, rotary<float>},
    {linear_quant<bf16>, linear_quant<float>},
    {linear_plain<bf16>, linear_plain<float>},
#ifdef __AVX512BF16__
    linear_pairs,
#else
    nullptr,
#endif
    greatest,
    store_chunks,
    load_chunks,
    exp_many,
    probe_read,
    probe_multiply,
};

}  // namespace headrace::HEADRACE_NS
