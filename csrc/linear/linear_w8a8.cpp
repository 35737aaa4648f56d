// Products of rows rounded to int8 with weights of int8: y[m, n] = sx[m] * sw[n] * sum over k of qx[m, k] * qw[n, k].
//
// M: rows, N: outputs, K: inputs. A row's scale sx is its greatest magnitude over 127, of that row alone; sums are whole numbers,
// exact in any order: a row's bits depend on nothing but the row, and are the same on every instruction set. Codes of weights
// are packed as [N / 64][K / 4 + 1][64][4], the last 256 bytes of a block being int32 [64]: -128 times the sum of an output's
// codes, with which sums begin where the processor multiplies unsigned codes of x, which are qx + 128; scales fp32 [N].
#include "linear/linear_w8a8.h"

#ifdef __aarch64__
#include <arm_neon.h>

#include "isa/features.h"
#endif

#include "isa/fetch.h"
#include "isa/pairs.h"
#include "isa/tiles.h"
#include "linear/codes.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t QUAD = 4 * COLUMNS;  // bytes of four inputs of a block's weights
constexpr int64_t BLOCK_QUADS = 64;    // met at once: 16 KB, which stay in L1 while rows pass by
constexpr int64_t TASK_ROWS = 128;     // rows of a task: their sums (32 KB) stay in L2
constexpr int64_t FETCHED = 8192;      // bytes that few rows fetch ahead
constexpr float LEAST = 1e-30f;  // rows of smaller numbers are rows of zeros: the inverse of their scale would be infinite

// x as it is multiplied, what is added to its codes, how many rows pass by at once, and whether they meet all of 64 outputs at once.
#if defined(__AVX512VNNI__)
typedef byte Rounded;
constexpr int OFFSET = 128, PASSING = 6;
constexpr bool WHOLE_BLOCKS = true;
#elif defined(__AVX2__)
typedef int16_t Rounded;
constexpr int OFFSET = 0, PASSING = 4;
constexpr bool WHOLE_BLOCKS = false;
#else
typedef int8_t Rounded;
constexpr int OFFSET = 0, PASSING = 4;
constexpr bool WHOLE_BLOCKS = false;
#endif
typedef Rounded RoundedLanes __attribute__((vector_size(W * sizeof(Rounded))));

// The greatest magnitude of x [n], as its bits: those of infinity or more where one is not finite.
template <typename T> int32_t greatest_bits(const T *x, int64_t n) {
  vi most = {};
  for (int64_t i = 0; i < n; i += W) {
    const vi bits = reinterpret_cast<vi>(load_up_to(x + i, n - i)) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t top = 0;
  for (int lane = 0; lane < W; ++lane) top = most[lane] > top ? most[lane] : top;
  return top;
}

// codes [n] = x / scale to the nearest, plus OFFSET. A row that is not finite has the scale NaN.
template <typename T> void round_row(const T *x, int64_t n, Rounded *codes, float *scale) {
  constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number, in the last bits
  const int32_t bits = greatest_bits(x, n);
  float top;
  memcpy(&top, &bits, sizeof top);
  const bool finite = bits < 0x7f800000, zero = !finite || top < LEAST;
  *scale = finite ? (zero ? 0.0f : top / 127.0f) : __builtin_nanf("");
  if (zero) {
    memset(codes, OFFSET, n * sizeof(Rounded));
    return;
  }
  const vf inverse = splat(127.0f / top);
  for (int64_t i = 0; i < n; i += W) {
    const vf y = load_up_to(x + i, n - i) * inverse + splat(SHIFT);
    const RoundedLanes narrow = __builtin_convertvector(reinterpret_cast<vi>(y) + (OFFSET - 0x4b400000), RoundedLanes);
    memcpy(codes + i, &narrow, (n - i < W ? n - i : W) * sizeof(Rounded));
  }
}

#if defined(__AVX512VNNI__)

// sum += unsigned bytes of x times signed ones of w, by fours. (Of the intrinsic GCC 12 makes copies of all sums.)
HEADRACE_INLINE void add_dots(vi &sum, vi x, vi w) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); }

// sums[R][64] += x[R][4 quads] . w[quads][64][4], fetching LINES cache lines of `next` for each quad meanwhile.
template <int R, int LINES>
HEADRACE_APART void tile(const Rounded *x, int64_t x_stride, const byte *w, int64_t quads, int32_t *sums, const byte *next) {
  vi sum[R][4];  // not __m512i: GCC 12 keeps an array of those in memory
  HEADRACE_EACH(r, R, HEADRACE_EACH(c, 4, memcpy(&sum[r][c], sums + r * COLUMNS + c * 16, 64)));
  for (int64_t i = 0; i < quads; ++i) {
    if constexpr (LINES > 1) fetch_lines<LINES, TO_L2>(next + i * QUAD);
    else fetch_lines<LINES>(next + i * QUAD);
    vi weight[4];
    HEADRACE_EACH(c, 4, memcpy(&weight[c], w + i * QUAD + c * 64, 64));
    HEADRACE_EACH(r, R, {
      int32_t four;
      memcpy(&four, x + r * x_stride + 4 * i, sizeof four);
      const vi input = four - vi{};
      HEADRACE_EACH(c, 4, add_dots(sum[r][c], input, weight[c]));
    });
  }
  HEADRACE_EACH(r, R, HEADRACE_EACH(c, 4, memcpy(sums + r * COLUMNS + c * 16, &sum[r][c], 64)));
}

#elif defined(__AVX2__)

// Sixteen bytes of weights, four outputs, as numbers of 16 bits: multiplied and added by pairs, they make two sums an output.
template <int R, int LINES>
HEADRACE_APART void tile(const Rounded *x, int64_t x_stride, const byte *w, int64_t quads, int32_t *sums, const byte *next) {
  for (int c = 0; c < COLUMNS; c += 8) {
    __m256i sum[R][2];
    HEADRACE_EACH(r, R, HEADRACE_EACH(h, 2, sum[r][h] = _mm256_setzero_si256()));
    for (int64_t i = 0; i < quads; ++i) {
      if (c == 0) fetch_lines<LINES>(next + i * QUAD);
      __m256i weight[2];
      HEADRACE_EACH(h, 2, {
        const byte *from = w + i * QUAD + 4 * c + 16 * h;
        weight[h] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
      });
      HEADRACE_EACH(r, R, {
        int64_t four;
        memcpy(&four, x + r * x_stride + 4 * i, sizeof four);
        const __m256i input = _mm256_set1_epi64x(four);
        HEADRACE_EACH(h, 2, sum[r][h] = _mm256_add_epi32(sum[r][h], _mm256_madd_epi16(input, weight[h])));
      });
    }
    HEADRACE_EACH(r, R, {
      // Neighbours added; their 128-bit halves come as 0, 2, 1, 3.
      const __m256i both = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum[r][0], sum[r][1]), 0xd8);
      __m256i *to = reinterpret_cast<__m256i *>(sums + r * COLUMNS + c);
      _mm256_storeu_si256(to, _mm256_add_epi32(_mm256_loadu_si256(to), both));
    });
  }
}

#elif defined(__aarch64__)

// Products of bytes widened by pairs: what every ARM processor has.
struct Pairs {
  HEADRACE_INLINE int32x4_t add(int32x4_t sum, int8x16_t x, int8x16_t w) {
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(w)));  // two sums of each of two outputs
    return vaddq_s32(sum, vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(x, w))));
  }
};

// The instruction for it. (The intrinsic would have to be compiled for processors that have it, and all that calls it too.)
struct Dots {
  HEADRACE_INLINE int32x4_t add(int32x4_t sum, int8x16_t x, int8x16_t w) {
    asm(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(w));
    return sum;
  }
};

// Sixteen outputs at a time, whose sums for R rows stay in registers.
template <typename Way, int R, int LINES>
HEADRACE_APART void tile_by(const Rounded *x, int64_t x_stride, const byte *w, int64_t quads, int32_t *sums, const byte *next) {
  for (int c = 0; c < COLUMNS; c += 16) {
    int32x4_t sum[R][4];
    HEADRACE_EACH(r, R, HEADRACE_EACH(v, 4, sum[r][v] = vld1q_s32(sums + r * COLUMNS + c + 4 * v)));
    for (int64_t i = 0; i < quads; ++i) {
      if (c == 0) fetch_lines<LINES>(next + i * QUAD);
      int8x16_t weight[4];
      HEADRACE_EACH(v, 4, weight[v] = vld1q_s8(reinterpret_cast<const int8_t *>(w + i * QUAD + 4 * c + 16 * v)));
      HEADRACE_EACH(r, R, {
        int32_t four;
        memcpy(&four, x + r * x_stride + 4 * i, sizeof four);
        const int8x16_t input = vreinterpretq_s8_s32(vdupq_n_s32(four));
        HEADRACE_EACH(v, 4, sum[r][v] = Way::add(sum[r][v], input, weight[v]));
      });
    }
    HEADRACE_EACH(r, R, HEADRACE_EACH(v, 4, vst1q_s32(sums + r * COLUMNS + c + 4 * v, sum[r][v])));
  }
}

template <int R, int LINES>
void tile(const Rounded *x, int64_t x_stride, const byte *w, int64_t quads, int32_t *sums, const byte *next) {
  static const bool dots = has_dot_products();
  dots ? tile_by<Dots, R, LINES>(x, x_stride, w, quads, sums, next)
       : tile_by<Pairs, R, LINES>(x, x_stride, w, quads, sums, next);
}

#else

template <int R, int LINES>
void tile(const Rounded *x, int64_t x_stride, const byte *w, int64_t quads, int32_t *sums, const byte *) {
  for (int64_t i = 0; i < quads; ++i)
    for (int r = 0; r < R; ++r) {
      const int8_t *four = reinterpret_cast<const int8_t *>(x + r * x_stride + 4 * i);
      const int8_t *weight = reinterpret_cast<const int8_t *>(w + i * QUAD);
      int32_t *to = sums + r * COLUMNS;
      for (int c = 0; c < COLUMNS; ++c)
        to[c] +=
            four[0] * weight[4 * c] + four[1] * weight[4 * c + 1] + four[2] * weight[4 * c + 2] + four[3] * weight[4 * c + 3];
    }
}

#endif

template <int LINES>
void tile_of(int rows, const Rounded *x, int64_t x_stride, const byte *w, int64_t quads, int32_t *sums, const byte *next) {
  if constexpr (PASSING > 4) {
    if (rows == 6) return tile<6, LINES>(x, x_stride, w, quads, sums, next);
    if (rows == 5) return tile<5, LINES>(x, x_stride, w, quads, sums, next);
  }
  switch (rows) {
    case 1: return tile<1, LINES>(x, x_stride, w, quads, sums, next);
    case 2: return tile<2, LINES>(x, x_stride, w, quads, sums, next);
    case 3: return tile<3, LINES>(x, x_stride, w, quads, sums, next);
    default: return tile<4, LINES>(x, x_stride, w, quads, sums, next);
  }
}

#ifdef __AMX_INT8__

constexpr int64_t STEP_BYTES = TILE * QUAD;  // bytes of the weights of 64 inputs

// The same for up to 16 rows, as many as `tiles` have taken, and `steps` times 64 inputs.
HEADRACE_APART void tile_steps_of_codes(const Rounded *x, int64_t x_stride, const byte *w, int64_t steps, int32_t *sums) {
  asm volatile("" ::: "memory");  // GCC 12 knows neither that loading a tile reads memory nor that storing one writes it
  _tile_loadd(0, sums, QUAD);
  _tile_loadd(1, sums + 16, QUAD);
  _tile_loadd(2, sums + 32, QUAD);
  _tile_loadd(3, sums + 48, QUAD);
  for (int64_t i = 0; i < steps; ++i, x += 64, w += STEP_BYTES) {
    _tile_loadd(4, x, x_stride);
    _tile_loadd(6, w, QUAD);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(7, w + 64, QUAD);
    _tile_dpbusd(1, 4, 7);
    _tile_loadd(6, w + 128, QUAD);
    _tile_dpbusd(2, 4, 6);
    _tile_loadd(7, w + 192, QUAD);
    _tile_dpbusd(3, 4, 7);
  }
  _tile_stored(0, sums, QUAD);
  _tile_stored(1, sums + 16, QUAD);
  _tile_stored(2, sums + 32, QUAD);
  _tile_stored(3, sums + 48, QUAD);
  asm volatile("" ::: "memory");
}

void multiply_block_by_tiles(const Rounded *x, int64_t x_stride, int rows, const byte *w, int64_t count, int32_t *sums) {
  Tiles tiles;
  for (int row = 0; row < rows; row += TILE) {
    tiles.take(rows - row < TILE ? rows - row : TILE);
    tile_steps_of_codes(x + row * x_stride, x_stride, w, count / TILE, sums + row * COLUMNS);
  }
}

#endif

// sums [rows, 64] += x . w over `count` quads.
void multiply_block(const Rounded *x, int64_t x_stride, int rows, const byte *w, int64_t count, int32_t *sums) {
#ifdef __AMX_INT8__
  if (count % TILE == 0 && rows > PASSING) return multiply_block_by_tiles(x, x_stride, rows, w, count, sums);
#endif
  const int tiles = (rows + PASSING - 1) / PASSING;
  if (tiles == 1) return tile_of<QUAD / 64>(rows, x, x_stride, w, count, sums, w + count * QUAD);
  for (int i = 0; i < tiles; ++i) {
    const int row = rows * i / tiles, n = rows * (i + 1) / tiles - row;
    const byte *next = w + count * QUAD;  // the first tiles fetch the next block, a line for each quad
    if (i < QUAD / 64) tile_of<1>(n, x + row * x_stride, x_stride, w, count, sums + row * COLUMNS, next + i * 64);
    else tile_of<0>(n, x + row * x_stride, x_stride, w, count, sums + row * COLUMNS, next);
  }
}

// The whole numbers of one packed block of outputs: sums [rows, 64].
void multiply(const Rounded *x, int64_t x_stride, int rows, const byte *w, int64_t quads, int32_t *sums) {
  const byte *begin = w + quads * QUAD;
  for (int row = 0; row < rows; ++row)
    OFFSET ? memcpy(sums + row * COLUMNS, begin, QUAD) : memset(sums + row * COLUMNS, 0, QUAD);
  if (WHOLE_BLOCKS && rows <= PASSING) return tile_of<QUAD / 64>(rows, x, x_stride, w, quads, sums, w + FETCHED);
  for (int64_t k = 0; k < quads; k += BLOCK_QUADS) {
    const int64_t count = quads - k < BLOCK_QUADS ? quads - k : BLOCK_QUADS;
    multiply_block(x + 4 * k, x_stride, rows, w + k * QUAD, count, sums);
  }
}

// In place: whole numbers [rows, 64] as fp32 times the rows' scales.
void scale_rows(float *sums, const float *scales, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row, sums += COLUMNS)
    for (int64_t c = 0; c < COLUMNS; c += W) {
      vi whole;
      memcpy(&whole, sums + c, sizeof whole);
      store(sums + c, __builtin_convertvector(whole, vf) * splat(scales[row]));
    }
}

}  // namespace

template <typename T> void linear_w8a8(const LinearQuant &any) {
  static thread_local Arena mine;
  const LinearOf<Int8> a{any};
  const int64_t stride = (a.inputs + 63) / 64 * 64 + 64;  // no power of two: rows would share few places in L1
  Scratch memory = mine.at_least(room<Rounded>(a.rows * stride) + room<float>(a.rows));
  Rounded *codes = memory.take<Rounded>(a.rows * stride);
  float *scales = memory.take<float>(a.rows);
  const T *x = static_cast<const T *>(a.x);
  each_row(a, [&](const LinearOf<Int8> &, int64_t row) {
    round_row(x + row * a.x_stride, a.inputs, codes + row * stride, scales + row);
  });
  const int64_t quads = a.inputs / 4;
  each_block<T>(a, TASK_ROWS, 0, [&](const auto &own, int64_t block, int64_t first, int64_t last, float *sums, Scratch) {
    const byte *w = static_cast<const byte *>(own.codes) + block * (quads + 1) * QUAD;
    multiply(codes + first * stride, stride, static_cast<int>(last - first), w, quads, reinterpret_cast<int32_t *>(sums));
    scale_rows(sums, scales + first, last - first);
  });
}

HEADRACE_BOTH_TYPES(linear_w8a8, LinearQuant)

}  // namespace headrace::HEADRACE_NS
