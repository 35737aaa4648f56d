// The kernels of one instruction set: those in the list of kernels.h.
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

#define PER_TYPE(name, Arguments) template <typename T> void name(const Arguments &);
#define ACTIVATION(name) PER_TYPE(name, Unary)
#define FUNCTION(name, result, parameters) result name parameters;
HEADRACE_OPERATIONS(PER_TYPE, FUNCTION, FUNCTION)
HEADRACE_ACTIVATIONS(ACTIVATION)
#undef PER_TYPE
#undef FUNCTION

#define PER_TYPE(name, Arguments) .name = {name<bf16>, name<float>},
#define FUNCTION(name, result, parameters) .name = name,
#ifdef __AVX512BF16__
#define PAIRS FUNCTION
#else
#define PAIRS(name, result, parameters) .name = nullptr,
#endif

extern const Kernels kernels;
constexpr Kernels kernels = {HEADRACE_OPERATIONS(PER_TYPE, FUNCTION, PAIRS) HEADRACE_ACTIVATIONS(ACTIVATION)};

}  // namespace headrace::HEADRACE_NS
