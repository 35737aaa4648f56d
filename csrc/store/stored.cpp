// One layer of chunks of the pools <-> sections of stored bytes, whose layout no kernel decides (kernels.chunk_formats).
//
// A section: numbers of K as [Hkv, D, 64], numbers of V as [Hkv, 64, D], then scales of K and of V where the numbers are
// codes. Activations are a V of one head. Formats:
//   raw: the pool's numbers, in plain order; of int8 pools the same as int8.
//   int8: codes, and fp32 scales [Hkv, 64], one for each token and head: number = code * scale.
//   int4: groups of 64 numbers that follow one another, codes 0..15 in 32 bytes (number i below number i + 32), and fp16
//   (low, step) for each: number = low + code * step, which fp32 holds exactly or rounds once.
// Bits are the same on every instruction set, and those of kernels.chunk_formats_torch. One thread: callers are copy streams.
#include "common/arena.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t GROUP = 64;
constexpr float MOST_HALF = 65504.0f;     // the greatest number of fp16
constexpr float MAGIC = 12582912.0f;      // 1.5 * 2^23: adding it rounds to an integer, to even at a half
constexpr int32_t INFINITE = 0x7f800000;  // absolute values, as integers, have the order of numbers; NaN comes last

// The numbers of one head: scales go by column for keys, by row for values.
struct Plane {
  int64_t rows, cols;
  bool by_column;

  int64_t size() const { return rows * cols; }
  int64_t scales() const { return by_column ? cols : rows; }
};

// Rows in pairs [rows / 2][cols][2] -> [rows][cols], or a copy.
template <typename T> void to_plain(const T *__restrict from, T *__restrict to, const Plane &p, bool vnni) {
  if (!vnni) return void(memcpy(to, from, p.size() * sizeof(T)));
  for (int64_t r = 0; r < p.rows; r += 2, from += 2 * p.cols, to += 2 * p.cols)
    for (int64_t c = 0; c < p.cols; ++c) to[c] = from[2 * c], to[p.cols + c] = from[2 * c + 1];
}

// And back.
template <typename T> void from_plain(const T *__restrict from, T *__restrict to, const Plane &p, bool vnni) {
  if (!vnni) return void(memcpy(to, from, p.size() * sizeof(T)));
  for (int64_t r = 0; r < p.rows; r += 2, from += 2 * p.cols, to += 2 * p.cols)
    for (int64_t c = 0; c < p.cols; ++c) to[2 * c] = from[c], to[2 * c + 1] = from[p.cols + c];
}

// f(first element, elements up to W) over n elements.
template <typename F> HEADRACE_INLINE void vectors(int64_t n, F f) {
  int64_t i = 0;
  for (; i + W <= n; i += W) f(i, W);
  if (i < n) f(i, n - i);
}

// Bytes <-> words by way of 16 bits: GCC takes a single step by scalars.
typedef byte vc __attribute__((vector_size(W)));

template <typename B> HEADRACE_INLINE vi words(B bytes) {
  return __builtin_convertvector(__builtin_convertvector(bytes, vs), vi);
}

HEADRACE_INLINE vb bytes(vi words) { return __builtin_convertvector(__builtin_convertvector(words, vs), vb); }

// Codes or numbers [rows][cols] -> fp32, under `scales` if there are any.
template <typename T> void widen(const T *from, const float *scales, float *to, const Plane &p) {
  for (int64_t r = 0; r < p.rows; ++r, from += p.cols, to += p.cols)
    vectors(p.cols, [&](int64_t c, int64_t n) HEADRACE_ALWAYS_INLINE {
      const vf x = load_up_to(from + c, n);
      if (!scales) return store_up_to(to + c, x, n);
      store_up_to(to + c, x * (p.by_column ? load_up_to(scales + c, n) : splat(scales[r])), n);
    });
}

HEADRACE_INLINE vi sizes(vf x) { return reinterpret_cast<vi>(x) & 0x7fffffff; }

HEADRACE_INLINE int32_t most(vi x) {
  int32_t top = 0;
  for (int i = 0; i < W; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// The greatest |x| / 127 of each row or column. Whether all are finite.
bool find_scales(const float *x, float *scales, const Plane &p) {
  bool finite = true;
  if (p.by_column) {
    for (int64_t c = 0; c < p.cols; c += W) {
      vi top = {};
      for (int64_t r = 0; r < p.rows; ++r) {
        const vi size = sizes(load(x + r * p.cols + c));
        top = size > top ? size : top;
      }
      finite = finite && most(top) < INFINITE;
      store(scales + c, reinterpret_cast<vf>(top) / 127.0f);
    }
    return finite;
  }
  for (int64_t r = 0; r < p.rows; ++r, x += p.cols) {
    vi top = {};
    vectors(p.cols, [&](int64_t c, int64_t n) HEADRACE_ALWAYS_INLINE {
      const vi size = sizes(load_up_to(x + c, n));
      top = size > top ? size : top;
    });
    finite = finite && most(top) < INFINITE;
    scales[r] = number(most(top)) / 127.0f;
  }
  return finite;
}

// x / scale, rounded to even, in -127..127; 0 where the scale is.
HEADRACE_INLINE vf code_of(vf x, vf scale) {
  vf y = x / scale;
  y = y > 127.0f ? splat(127.0f) : y;  // where the scale is subnormal
  y = y < -127.0f ? splat(-127.0f) : y;
  y = scale > 0.0f ? y : vf{};
  return (y + MAGIC) - MAGIC;
}

// fp32 -> int8 codes and scales. Whether all are finite.
bool quantise8(const float *x, int8_t *codes, float *scales, const Plane &p) {
  if (!find_scales(x, scales, p)) return false;
  for (int64_t r = 0; r < p.rows; ++r, x += p.cols, codes += p.cols)
    vectors(p.cols, [&](int64_t c, int64_t n) HEADRACE_ALWAYS_INLINE {
      store_up_to(codes + c, code_of(load_up_to(x + c, n), p.by_column ? load_up_to(scales + c, n) : splat(scales[r])), n);
    });
  return true;
}

float widened(uint16_t half) {
  const int32_t size = half & 0x7fff, sign = (half & 0x8000) << 16;
  const float value = size < 0x400 ? static_cast<float>(size) * 0x1p-24f : number((size << 13) + (112 << 23));
  return sign ? -value : value;
}

// x of at most 65504 in size, to fp16 towards 0; whether that was exact.
bool truncate(float x, uint16_t &half) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const int32_t size = bits & 0x7fffffff, sign = bits < 0 ? 0x8000 : 0;
  if (size >= 113 << 23) {
    half = static_cast<uint16_t>(sign | ((size >> 13) - (112 << 10)));
    return (size & 0x1fff) == 0;
  }
  const float units = number(size) * 0x1p24f;  // of the least fp16
  const int32_t whole = static_cast<int32_t>(units);
  half = static_cast<uint16_t>(sign | whole);
  return static_cast<float>(whole) == units;
}

uint16_t half_below(float x) {
  uint16_t half;
  const bool exact = truncate(x, half);
  return exact || x >= 0.0f ? half : half + 1;
}

uint16_t half_above(float x) {  // x >= 0
  uint16_t half;
  return truncate(x, half) ? half : half + 1;
}

// 64 numbers -> 32 bytes of codes, and (low, step). Whether all are of at most 65504.
bool quantise_group(const float *x, byte *codes, uint16_t *bounds) {
  vf low = load(x), high = low;
  vi top = {};
  for (int64_t i = 0; i < GROUP; i += W) {
    const vf y = load(x + i);
    const vi size = sizes(y);
    low = y < low ? y : low;
    high = y > high ? y : high;
    top = size > top ? size : top;
  }
  if (!(number(most(top)) <= MOST_HALF)) return false;
  float least = low[0], greatest = high[0];
  for (int i = 1; i < W; ++i) {
    least = low[i] < least ? low[i] : least;
    greatest = high[i] > greatest ? high[i] : greatest;
  }
  bounds[0] = half_below(least + 0.0f);
  const vf base = splat(widened(bounds[0]));
  bounds[1] = half_above((greatest - base[0]) / 15.0f + 0.0f);  // never -0
  const vf step = splat(widened(bounds[1]));
  vi numbers[GROUP / W];
  for (int64_t i = 0; i < GROUP / W; ++i) {
    vf y = (load(x + i * W) - base) / step;
    y = y > 15.0f ? splat(15.0f) : y;
    y = step > 0.0f ? y : vf{};
    numbers[i] = __builtin_convertvector((y + MAGIC) - MAGIC, vi);
  }
  for (int64_t i = 0; i < GROUP / W / 2; ++i) {
    const vb packed = bytes(numbers[i] | numbers[i + GROUP / W / 2] << 4);
    memcpy(codes + i * W, &packed, sizeof packed);
  }
  return true;
}

void widen_group(const byte *codes, const uint16_t *bounds, float *x) {
  const vf low = splat(widened(bounds[0])), step = splat(widened(bounds[1]));
  for (int64_t i = 0; i < GROUP / 2; i += W) {
    vc packed;
    memcpy(&packed, codes + i, sizeof packed);
    const vi both = words(packed);
    store(x + i, low + __builtin_convertvector(both & 15, vf) * step);
    store(x + GROUP / 2 + i, low + __builtin_convertvector(both >> 4, vf) * step);
  }
}

// Bytes of one head's numbers in a section, and of its scales.
struct Sizes {
  int64_t codes, scales;

  Sizes(const Plane &p, Format format, int64_t element) {
    codes = format == Format::raw ? p.size() * element : format == Format::int8 ? p.size() : p.size() / 2;
    scales = format == Format::raw ? 0 : format == Format::int8 ? p.scales() * 4 : p.size() / GROUP * 4;
  }
};

// One head's numbers, in the pool and in a section.
template <typename T> struct Head {
  T *pool;
  float *pool_scales;  // of int8 pools
  byte *codes, *scales;
  Plane plane;
  bool vnni;
};

template <typename T> bool store_head(const Head<T> &h, Format format) {
  constexpr bool is_int8 = sizeof(T) == 1;
  if (format == Format::raw || (is_int8 && format == Format::int8)) {
    to_plain(h.pool, reinterpret_cast<T *>(h.codes), h.plane, h.vnni);
    if (is_int8) memcpy(h.scales, h.pool_scales, h.plane.scales() * sizeof(float));
    return true;
  }
  Scratch memory = arena(room<float>(h.plane.size()) + room<T>(h.plane.size()));
  float *wide = memory.take<float>(h.plane.size());
  T *plain = memory.take<T>(h.plane.size());
  to_plain(h.pool, plain, h.plane, h.vnni);
  widen(plain, h.pool_scales, wide, h.plane);
  if (format == Format::int8)
    return quantise8(wide, reinterpret_cast<int8_t *>(h.codes), reinterpret_cast<float *>(h.scales), h.plane);
  for (int64_t g = 0; g < h.plane.size() / GROUP; ++g)
    if (!quantise_group(wide + g * GROUP, h.codes + g * GROUP / 2, reinterpret_cast<uint16_t *>(h.scales) + 2 * g))
      return false;
  return true;
}

template <typename T> void narrow(const float *wide, T *to, float *, const Plane &p) {
  vectors(p.size(), [&](int64_t i, int64_t n) HEADRACE_ALWAYS_INLINE { store_up_to(to + i, load_up_to(wide + i, n), n); });
}

template <> void narrow(const float *wide, int8_t *to, float *scales, const Plane &p) { quantise8(wide, to, scales, p); }

template <typename T> void load_head(const Head<T> &h, Format format) {
  constexpr bool is_int8 = sizeof(T) == 1;
  if (format == Format::raw || (is_int8 && format == Format::int8)) {
    from_plain(reinterpret_cast<const T *>(h.codes), h.pool, h.plane, h.vnni);
    if (is_int8) memcpy(h.pool_scales, h.scales, h.plane.scales() * sizeof(float));
    return;
  }
  Scratch memory = arena(room<float>(h.plane.size()) + room<T>(h.plane.size()));
  float *wide = memory.take<float>(h.plane.size());
  T *plain = memory.take<T>(h.plane.size());
  if (format == Format::int8)
    widen(reinterpret_cast<const int8_t *>(h.codes), reinterpret_cast<const float *>(h.scales), wide, h.plane);
  else
    for (int64_t g = 0; g < h.plane.size() / GROUP; ++g)
      widen_group(h.codes + g * GROUP / 2, reinterpret_cast<const uint16_t *>(h.scales) + 2 * g, wide + g * GROUP);
  narrow(wide, plain, h.pool_scales, h.plane);
  from_plain(plain, h.pool, h.plane, h.vnni);
}

// f(head) for every head of one chunk, K first, while it returns true.
template <typename T, typename F> bool heads_of(const Stored &a, int64_t index, F f) {
  const Plane planes[2] = {{a.dim, CHUNK, true}, {CHUNK, a.dim, false}};
  const Format format = sizeof(T) == 1 && a.format == Format::raw ? Format::int8 : a.format;
  void *pools[2] = {a.k, a.v};
  float *pool_scales[2] = {a.k_scale, a.v_scale};
  const int64_t slot = a.slots[index], kinds = a.k ? 2 : 1;
  const Sizes keys(planes[0], format, sizeof(T)), values(planes[1], format, sizeof(T));
  byte *codes = static_cast<byte *>(a.sections) + index * a.stride, *scales = codes + kinds * a.heads * keys.codes;
  for (int64_t kind = 2 - kinds; kind < 2; ++kind) {
    const Plane &plane = planes[kind];
    const Sizes &sizes = kind ? values : keys;
    T *pool = static_cast<T *>(pools[kind]) + slot * a.heads * plane.size();
    float *own = pool_scales[kind] ? pool_scales[kind] + slot * a.heads * CHUNK : nullptr;
    for (int64_t head = 0; head < a.heads; ++head, codes += sizes.codes, scales += sizes.scales, pool += plane.size()) {
      if (!f(Head<T>{pool, own, codes, scales, plane, a.vnni})) return false;
      own += own ? CHUNK : 0;
    }
  }
  return true;
}

template <typename T> void store_all(const Stored &a) {
  for (int64_t i = 0; i < a.count; ++i)
    a.fits[i] = heads_of<T>(a, i, [&](const Head<T> &head) { return store_head(head, a.format); });
}

template <typename T> void load_all(const Stored &a) {
  for (int64_t i = 0; i < a.count; ++i) heads_of<T>(a, i, [&](const Head<T> &head) { return load_head(head, a.format), true; });
}

}  // namespace

void store_chunks(const Stored &a) {
  switch (a.element) {
    case Element::bf16: return store_all<bf16>(a);
    case Element::fp32: return store_all<float>(a);
    case Element::int8: return store_all<int8_t>(a);
  }
}

void load_chunks(const Stored &a) {
  switch (a.element) {
    case Element::bf16: return load_all<bf16>(a);
    case Element::fp32: return load_all<float>(a);
    case Element::int8: return load_all<int8_t>(a);
  }
}

}  // namespace headrace::HEADRACE_NS
