// Products with weights, y[m, n] = sum over k of x[m, k] * w[n, k]: every instruction set and type, sums in fp32.
//
// M: rows, N: outputs, K: inputs. Weights are packed as [N / 64][K][64] (kernels.cpu.Packed); bf16 is widened, which is
// exact. Every output is one chain of multiply-adds over ascending inputs, whatever M, tile, block or thread: a row's bits
// depend on nothing else.
#include "linear/linear.h"
#include "linear/passes.h"

namespace headrace::HEADRACE_NS {

template <typename T> void linear_plain(const Linear &a) {
  with_rows<T>(a, [&](auto *x, int64_t x_stride) {
    each_block<T>(a, MOST_PASS_ROWS, PASS_SCRATCH,
                  [&](const Linear &own, int64_t index, int64_t first, int64_t last, float *sums, Scratch memory) {
                    const T *w = static_cast<const T *>(own.w) + index * a.inputs * COLUMNS;
                    pass_all(
                        x + first * x_stride, x_stride, static_cast<int>(last - first), a.inputs,
                        [w](int64_t k) { return PlainWeights<T>{w + k * COLUMNS}; }, 0, [](int64_t) { return Folding{}; }, sums,
                        memory);
                  });
  });
}

HEADRACE_BOTH_TYPES(linear_plain, Linear)

}  // namespace headrace::HEADRACE_NS
