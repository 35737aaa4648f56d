// Products with weights, y[m, n] = sum over k of x[m, k] * w[n, k]: every instruction set and type, sums in fp32.
//
// M: rows, N: outputs, K: inputs. Weights are packed as [N / 64][K][64] (kernels.cpu.Packed); bf16 is widened, which is
// exact. Every output is one chain of multiply-adds over ascending inputs, whatever M, tile, block or thread: a row's bits
// depend on nothing else.
#include "linear.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int TILE_ROWS = 6;          // with four (AVX-512) or two vectors side by side they fill the registers
constexpr int64_t BLOCK_INPUTS = 64;  // inputs that rows pass by together: 16 KB of weights, two of which fit into L1
constexpr int64_t BLOCK_ROWS = 128;   // rows of a task: their sums (32 KB) and inputs stay in L2
constexpr int64_t LINE = 64;          // bytes

// Vectors of sums side by side: few rows need more of them, so that enough chains are under way.
constexpr int wide(int rows) { return W == 16 ? 4 : rows == 1 ? 8 : rows <= 3 ? 4 : 2; }

// What is fetched meanwhile: `lines` cache lines for each input, from `stride` bytes farther on each time.
struct Ahead {
  const char *from;
  int64_t stride;
  int lines;
};

// sums[R][C W] += x[R][inputs] . w[inputs][C W]
template <int R, int C, int LINES, typename T>
HEADRACE_APART void tile(const float *x, int64_t x_stride, const T *w, int64_t inputs, float *sums, Ahead ahead) {
  vf sum[R][C];
  each<R * C>([&](auto i) HEADRACE_ALWAYS_INLINE { sum[i / C][i % C] = load(sums + i / C * COLUMNS + i % C * W); });
  for (int64_t k = 0; k < inputs; ++k, ++x, w += COLUMNS, ahead.from += ahead.stride) {
    each<LINES>([&](auto line) HEADRACE_ALWAYS_INLINE { __builtin_prefetch(ahead.from + line * LINE); });
    vf weight[C];
    each<C>([&](auto c) HEADRACE_ALWAYS_INLINE { weight[c] = load(w + c * W); });
    each<R>([&](auto r) HEADRACE_ALWAYS_INLINE {
      const vf input = splat(x[r * x_stride]);
      each<C>([&](auto c) HEADRACE_ALWAYS_INLINE { sum[r][c] = madd(input, weight[c], sum[r][c]); });
    });
  }
  each<R * C>([&](auto i) HEADRACE_ALWAYS_INLINE { store(sums + i / C * COLUMNS + i % C * W, sum[i / C][i % C]); });
}

// All 64 outputs of R rows. The first columns fetch for all of them.
template <int R, typename T>
void group(const float *x, int64_t x_stride, const T *w, int64_t inputs, float *sums, Ahead ahead) {
  constexpr int C = wide(R);
  with_lines<4>(ahead.lines, [&](auto lines) { tile<R, C, lines>(x, x_stride, w, inputs, sums, ahead); });
  for (int64_t c = C * W; c < COLUMNS; c += C * W) tile<R, C, 0>(x, x_stride, w + c, inputs, sums + c, ahead);
}

template <typename T>
void group_of(int64_t rows, const float *x, int64_t x_stride, const T *w, int64_t inputs, float *sums, Ahead ahead) {
  switch (rows) {
    case 1: return group<1>(x, x_stride, w, inputs, sums, ahead);
    case 2: return group<2>(x, x_stride, w, inputs, sums, ahead);
    case 3: return group<3>(x, x_stride, w, inputs, sums, ahead);
    case 4: return group<4>(x, x_stride, w, inputs, sums, ahead);
    case 5: return group<5>(x, x_stride, w, inputs, sums, ahead);
    default: return group<6>(x, x_stride, w, inputs, sums, ahead);
  }
}

// All rows by a block of weights, each group of them fetching its share of the block that comes next.
template <typename T>
void pass(int64_t rows, const float *x, int64_t x_stride, const T *w, int64_t inputs, float *sums, const char *next,
          int64_t next_stride) {
  const int64_t groups = (rows + TILE_ROWS - 1) / TILE_ROWS, stride = (next_stride + groups - 1) / groups;
  const int lines = static_cast<int>((stride + LINE - 1) / LINE);
  for (int64_t row = 0; row < rows; row += TILE_ROWS) {
    const Ahead ahead = {next + inputs * next_stride * row / rows, stride, lines};
    group_of(rows - row < TILE_ROWS ? rows - row : TILE_ROWS, x + row * x_stride, x_stride, w, inputs,
             sums + row * COLUMNS, ahead);
  }
}

void widen(const bf16 *from, float *to, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  if (i < n) store_part(to + i, load_part(from + i, n - i), n - i);
}

// Floats for a block's inputs and weights, widened.
template <typename T>
constexpr int64_t SCRATCH = sizeof(T) == sizeof(float) ? 0 : (BLOCK_ROWS + COLUMNS) * BLOCK_INPUTS;

void block(const float *x, int64_t x_stride, int64_t rows, const float *w, int64_t inputs, float *sums, float *) {
  const char *next = reinterpret_cast<const char *>(w + inputs * COLUMNS);
  pass(rows, x, x_stride, w, inputs, sums, next, COLUMNS * sizeof(float));
}

// Weights that more than one group of rows passes by are widened once.
void block(const bf16 *x, int64_t x_stride, int64_t rows, const bf16 *w, int64_t inputs, float *sums, float *scratch) {
  const char *next = reinterpret_cast<const char *>(w + inputs * COLUMNS);
  float *wide_x = scratch, *wide_w = scratch + BLOCK_ROWS * BLOCK_INPUTS;
  for (int64_t row = 0; row < rows; ++row) widen(x + row * x_stride, wide_x + row * BLOCK_INPUTS, inputs);
  if (rows <= TILE_ROWS) return pass(rows, wide_x, BLOCK_INPUTS, w, inputs, sums, next, COLUMNS * sizeof(bf16));
  widen(w, wide_w, inputs * COLUMNS);
  pass(rows, wide_x, BLOCK_INPUTS, wide_w, inputs, sums, next, COLUMNS * sizeof(bf16));
}

}  // namespace

template <typename T> void linear_plain(const Linear &a) {
  each_block<T>(a, BLOCK_ROWS, SCRATCH<T>, [&](int64_t index, int64_t first, int64_t last, float *sums, float *scratch) {
    const T *x = static_cast<const T *>(a.x) + first * a.x_stride;
    const T *w = static_cast<const T *>(a.w) + index * a.inputs * COLUMNS;
    memset(sums, 0, (last - first) * COLUMNS * sizeof(float));
    for (int64_t k = 0; k < a.inputs; k += BLOCK_INPUTS) {
      const int64_t count = a.inputs - k < BLOCK_INPUTS ? a.inputs - k : BLOCK_INPUTS;
      block(x + k, a.x_stride, last - first, w + k * COLUMNS, count, sums, scratch);
    }
  });
}

template void linear_plain<bf16>(const Linear &);
template void linear_plain<float>(const Linear &);

}  // namespace headrace::HEADRACE_NS
