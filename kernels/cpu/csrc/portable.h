// The vector instructions that this folder uses, for CPUs without AVX-512 and its bfloat16 products.
//
// Types and functions have the names and the meaning of Intel's, so that kernels are written once.
// A vector of 512 bits is some vectors of the size that the CPU has, by the compiler's vector types;
// what is on no hot path goes lane by lane. Two differences in the last bit: a product of pairs of
// bfloat16 is two fused additions, and denormal numbers stay what they are.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace weft {

#ifdef __AVX2__
constexpr int PART_BYTES = 32;
#else
constexpr int PART_BYTES = 16;
#endif
constexpr int PARTS = 64 / PART_BYTES, PART_LANES = PART_BYTES / 4;

typedef float PartF __attribute__((vector_size(PART_BYTES)));
typedef int32_t PartI __attribute__((vector_size(PART_BYTES)));
typedef uint32_t PartU __attribute__((vector_size(PART_BYTES)));
typedef uint16_t PartW __attribute__((vector_size(PART_BYTES)));
typedef uint8_t PartB __attribute__((vector_size(PART_BYTES)));
typedef char PartC __attribute__((vector_size(PART_BYTES)));
typedef uint16_t PartH __attribute__((vector_size(PART_BYTES / 2)));

using __mmask8 = uint8_t;
using __mmask16 = uint16_t;
using __mmask32 = uint32_t;
using __mmask64 = uint64_t;

struct __attribute__((packed, may_alias)) __m128i {
  uint64_t lanes[2];
};
struct __m256bh;
struct __m256i {
  PartI part[PARTS / 2];
  __m256i() = default;
  inline __m256i(const __m256bh& x);
};
struct alignas(32) __m256 {
  float lanes[8];
};
struct __m256bh {
  __m256i bits;
};
inline __m256i::__m256i(const __m256bh& x) { *this = x.bits; }

struct __m512 {
  PartF part[PARTS];
};
struct __m512bh;
struct __m512i {
  PartI part[PARTS];
  __m512i() = default;
  inline __m512i(const __m512bh& x);
};
struct __m512bh {
  PartI part[PARTS];
  __m512bh() = default;
  __m512bh(const __m512i& x) {
    for (int p = 0; p < PARTS; ++p) part[p] = x.part[p];
  }
};
inline __m512i::__m512i(const __m512bh& x) {
  for (int p = 0; p < PARTS; ++p) part[p] = x.part[p];
}

// Each part of a vector, unrolled so that the parts stay in registers.
template <typename F>
inline __attribute__((always_inline)) void each_part(F f) {
#pragma GCC unroll 4
  for (int p = 0; p < PARTS; ++p) f(p);
}

// A vector's numbers as an array, and back.
template <typename T, int COUNT>
struct Array {
  T at[COUNT];
};

template <typename T, typename Vector>
inline Array<T, sizeof(Vector) / sizeof(T)> numbers_of(const Vector& x) {
  Array<T, sizeof(Vector) / sizeof(T)> array;
  std::memcpy(&array, &x, sizeof x);
  return array;
}

template <typename Vector, typename T, int COUNT>
inline Vector vector_of(const Array<T, COUNT>& array) {
  static_assert(sizeof array == sizeof(Vector));
  Vector x;
  std::memcpy(&x, &array, sizeof x);
  return x;
}

// f of the numbers of each lane.
template <typename T, typename Vector, typename F, typename... Others>
inline Vector by_lane(F f, const Vector& x, const Others&... others) {
  Array<T, sizeof(Vector) / sizeof(T)> out;
  const auto all = [&](int i, const auto&... arrays) { return f(arrays.at[i]...); };
  const auto run = [&](const auto&... arrays) {
    for (int i = 0; i < static_cast<int>(sizeof(Vector) / sizeof(T)); ++i)
      out.at[i] = static_cast<T>(all(i, arrays...));
  };
  run(numbers_of<T>(x), numbers_of<T>(others)...);
  return vector_of<Vector>(out);
}

// A bit for each lane in which f holds.
template <typename Mask, typename T, typename Vector, typename F, typename... Others>
inline Mask mask_by_lane(F f, const Vector& x, const Others&... others) {
  uint64_t mask = 0;
  const auto all = [&](int i, const auto&... arrays) { return f(arrays.at[i]...); };
  const auto run = [&](const auto&... arrays) {
    for (int i = 0; i < static_cast<int>(sizeof(Vector) / sizeof(T)); ++i)
      mask |= uint64_t{all(i, arrays...)} << i;
  };
  run(numbers_of<T>(x), numbers_of<T>(others)...);
  return static_cast<Mask>(mask);
}

// Loads and stores: memory of a lane that is masked out is not touched.

// Part by part: a copy of 64 bytes at once goes through the stack.
template <typename Part>
struct __attribute__((packed, may_alias)) Unaligned {
  Part part;
};

template <typename Vector>
inline Vector load_whole(const void* from) {
  Vector x;
  constexpr int COUNT = sizeof x.part / PART_BYTES;
  const auto* parts = static_cast<const Unaligned<std::decay_t<decltype(x.part[0])>>*>(from);
#pragma GCC unroll 4
  for (int p = 0; p < COUNT; ++p) x.part[p] = parts[p].part;
  return x;
}

template <typename Vector>
inline void store_whole(void* to, const Vector& x) {
  constexpr int COUNT = sizeof x.part / PART_BYTES;
  auto* parts = static_cast<Unaligned<std::decay_t<decltype(x.part[0])>>*>(to);
#pragma GCC unroll 4
  for (int p = 0; p < COUNT; ++p) parts[p].part = x.part[p];
}

template <typename T, typename Vector>
inline Vector load_lanes(uint64_t lanes, const void* p) {
  constexpr int COUNT = sizeof(Vector) / sizeof(T);
  if (lanes == (COUNT == 64 ? ~uint64_t{0} : (uint64_t{1} << COUNT) - 1)) return load_whole<Vector>(p);
  Array<T, COUNT> out{};
  for (int i = 0; i < COUNT; ++i)
    if (lanes >> i & 1) std::memcpy(&out.at[i], static_cast<const char*>(p) + i * sizeof(T), sizeof(T));
  return vector_of<Vector>(out);
}

template <typename T, typename Vector>
inline void store_lanes(void* p, uint64_t lanes, const Vector& x) {
  constexpr int COUNT = sizeof(Vector) / sizeof(T);
  if (lanes == (COUNT == 64 ? ~uint64_t{0} : (uint64_t{1} << COUNT) - 1)) {
    std::memcpy(p, &x, sizeof x);
    return;
  }
  const auto numbers = numbers_of<T>(x);
  for (int i = 0; i < COUNT; ++i)
    if (lanes >> i & 1) std::memcpy(static_cast<char*>(p) + i * sizeof(T), &numbers.at[i], sizeof(T));
}

inline __m512 _mm512_loadu_ps(const void* p) { return load_whole<__m512>(p); }
inline __m512 _mm512_load_ps(const void* p) { return load_whole<__m512>(p); }
inline __m512i _mm512_loadu_si512(const void* p) { return load_whole<__m512i>(p); }
inline __m256i _mm256_loadu_si256(const __m256i* p) { return load_whole<__m256i>(p); }
inline __m128i _mm_loadu_si128(const __m128i* p) { return *p; }
inline __m128i _mm_load_si128(const __m128i* p) { return *p; }
inline void _mm512_storeu_ps(void* p, const __m512& x) { store_whole(p, x); }
inline void _mm512_store_ps(void* p, const __m512& x) { store_whole(p, x); }
inline void _mm512_storeu_si512(void* p, const __m512i& x) { store_whole(p, x); }
inline void _mm512_store_si512(void* p, const __m512i& x) { store_whole(p, x); }
inline void _mm256_storeu_si256(__m256i* p, const __m256i& x) { store_whole(p, x); }

inline __m512 _mm512_maskz_loadu_ps(__mmask16 lanes, const void* p) {
  return load_lanes<float, __m512>(lanes, p);
}
inline __m512i _mm512_maskz_loadu_epi32(__mmask16 lanes, const void* p) {
  return load_lanes<int32_t, __m512i>(lanes, p);
}
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 lanes, const void* p) {
  return load_lanes<int16_t, __m512i>(lanes, p);
}
inline __m256i _mm256_maskz_loadu_epi16(__mmask16 lanes, const void* p) {
  return load_lanes<int16_t, __m256i>(lanes, p);
}
inline __m256i _mm256_maskz_loadu_epi8(__mmask32 lanes, const void* p) {
  return load_lanes<int8_t, __m256i>(lanes, p);
}
inline void _mm512_mask_storeu_ps(void* p, __mmask16 lanes, const __m512& x) {
  store_lanes<float>(p, lanes, x);
}
inline void _mm512_mask_storeu_epi32(void* p, __mmask16 lanes, const __m512i& x) {
  store_lanes<int32_t>(p, lanes, x);
}
inline void _mm512_mask_storeu_epi64(void* p, __mmask8 lanes, const __m512i& x) {
  store_lanes<int64_t>(p, lanes, x);
}
inline void _mm256_mask_storeu_epi16(void* p, __mmask16 lanes, const __m256i& x) {
  store_lanes<int16_t>(p, lanes, x);
}

constexpr int _MM_HINT_T0 = 3;
inline void _mm_prefetch(const void* p, int) { __builtin_prefetch(p); }

// Constants, and other types of the same bits.

inline __m512 _mm512_set1_ps(float x) {
  __m512 out;
  each_part([&](int p) { out.part[p] = PartF{} + x; });
  return out;
}
inline __m512 _mm512_setzero_ps() {
  __m512 out;
  each_part([&](int p) { out.part[p] = PartF{}; });
  return out;
}
inline __m512i _mm512_set1_epi32(int32_t x) {
  __m512i out;
  each_part([&](int p) { out.part[p] = PartI{} + x; });
  return out;
}
inline __m512i _mm512_setzero_si512() { return _mm512_set1_epi32(0); }
inline __m512i _mm512_set1_epi16(int16_t x) {
  return _mm512_set1_epi32(static_cast<int32_t>(static_cast<uint16_t>(x) * 0x10001u));
}
inline __m512i _mm512_set1_epi8(int8_t x) {
  return _mm512_set1_epi32(static_cast<int32_t>(static_cast<uint8_t>(x) * 0x1010101u));
}
inline __m512i _mm512_maskz_set1_epi32(__mmask16 lanes, int32_t x) {
  Array<int32_t, 16> out;
  for (int i = 0; i < 16; ++i) out.at[i] = lanes >> i & 1 ? x : 0;
  return vector_of<__m512i>(out);
}
inline __m512i _mm512_setr_epi64(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f,
                                 int64_t g, int64_t h) {
  return vector_of<__m512i>(Array<int64_t, 8>{{a, b, c, d, e, f, g, h}});
}
inline __m256i _mm256_set1_epi32(int32_t x) {
  Array<int32_t, 8> out;
  for (int32_t& lane : out.at) lane = x;
  return vector_of<__m256i>(out);
}
inline __m512 _mm512_castsi512_ps(const __m512i& x) {
  __m512 out;
  each_part([&](int p) { out.part[p] = (PartF)x.part[p]; });
  return out;
}
inline __m256i _mm512_extracti64x4_epi64(const __m512i& x, int half) {
  __m256i out;
#pragma GCC unroll 2
  for (int p = 0; p < PARTS / 2; ++p) out.part[p] = x.part[half * PARTS / 2 + p];
  return out;
}
inline __m256i _mm512_castsi512_si256(const __m512i& x) { return _mm512_extracti64x4_epi64(x, 0); }
inline __m256 _mm512_extractf32x8_ps(const __m512& x, int half) {
  __m256 out;
  std::memcpy(&out, reinterpret_cast<const char*>(&x) + 32 * half, sizeof out);
  return out;
}
inline __m256 _mm512_castps512_ps256(const __m512& x) { return _mm512_extractf32x8_ps(x, 0); }
inline __m512i _mm512_inserti64x4(__m512i x, const __m256i& y, int half) {
#pragma GCC unroll 2
  for (int p = 0; p < PARTS / 2; ++p) x.part[half * PARTS / 2 + p] = y.part[p];
  return x;
}
inline __m512i _mm512_broadcast_i64x4(const __m256i& x) {
  __m512i out;
  each_part([&](int p) { out.part[p] = x.part[p % (PARTS / 2)]; });
  return out;
}
inline __m512i _mm512_broadcast_i32x4(const __m128i& x) {
  Array<__m128i, 4> out{{x, x, x, x}};
  return vector_of<__m512i>(out);
}

// Arithmetic on float32.

#define WEFT_PARTS(NAME, TYPE, EXPRESSION)                     \
  inline TYPE NAME(const TYPE& x, const TYPE& y) {             \
    TYPE out;                                                  \
    each_part([&](int p) {                                     \
      const auto a = x.part[p], b = y.part[p];                 \
      out.part[p] = EXPRESSION;                                \
    });                                                        \
    return out;                                                \
  }
WEFT_PARTS(_mm512_add_ps, __m512, a + b)
WEFT_PARTS(_mm512_sub_ps, __m512, a - b)
WEFT_PARTS(_mm512_mul_ps, __m512, a* b)
WEFT_PARTS(_mm512_div_ps, __m512, a / b)
WEFT_PARTS(_mm512_max_ps, __m512, a > b ? a : b)
WEFT_PARTS(_mm512_and_si512, __m512i, a& b)
WEFT_PARTS(_mm512_or_si512, __m512i, a | b)
WEFT_PARTS(_mm512_min_epi32, __m512i, a < b ? a : b)
#undef WEFT_PARTS

inline PartF fused(const PartF& a, const PartF& b, const PartF& c) {
#if defined(__FMA__) && defined(__AVX2__)
  return __builtin_ia32_vfmaddps256(a, b, c);
#else
  PartF out;
  for (int i = 0; i < PART_LANES; ++i) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return out;
#endif
}
inline __m512 _mm512_fmadd_ps(const __m512& x, const __m512& y, const __m512& z) {
  __m512 out;
  each_part([&](int p) { out.part[p] = fused(x.part[p], y.part[p], z.part[p]); });
  return out;
}
inline __m512 _mm512_fmsub_ps(const __m512& x, const __m512& y, const __m512& z) {
  __m512 out;
  each_part([&](int p) { out.part[p] = fused(x.part[p], y.part[p], -z.part[p]); });
  return out;
}
// Adds the products of pairs of bfloat16 to `sum`.
inline __m512 _mm512_dpbf16_ps(__m512 sum, const __m512bh& x, const __m512bh& y) {
  each_part([&](int p) {
    const auto low = [](PartI pairs) { return (PartF)(pairs << 16); };
    const auto high = [](PartI pairs) { return (PartF)(pairs & static_cast<int32_t>(0xffff0000u)); };
    sum.part[p] = fused(high(x.part[p]), high(y.part[p]), sum.part[p]);
    sum.part[p] = fused(low(x.part[p]), low(y.part[p]), sum.part[p]);
  });
  return sum;
}

constexpr int _MM_FROUND_TO_ZERO = 3, _MM_FROUND_NO_EXC = 8;
// To the nearest whole number, or towards zero.
inline __m512 _mm512_roundscale_ps(const __m512& x, int how) {
  if (how & _MM_FROUND_TO_ZERO) return by_lane<float>([](float v) { return std::trunc(v); }, x);
  return by_lane<float>([](float v) { return std::nearbyint(v); }, x);
}
// x times 2^n, for whole n.
inline __m512 _mm512_scalef_ps(const __m512& x, const __m512& n) {
  __m512 out;
  each_part([&](int p) {
    // In two steps: each factor is a normal number. -200 and 128 are as far as callers go.
    const PartF all = n.part[p];
    const PartI whole = __builtin_convertvector(all == all ? all : PartF{}, PartI), half = whole >> 1;
    const auto power = [](PartI e) { return (PartF)((e + 127) << 23); };
    out.part[p] = x.part[p] * power(half) * power(whole - half);
  });
  return out;
}
inline __m512 _mm512_mask_mov_ps(const __m512& old, __mmask16 lanes, const __m512& x) {
  if (lanes == 0xffff) return x;
  const auto a = numbers_of<float>(old), b = numbers_of<float>(x);
  Array<float, 16> out;
  for (int i = 0; i < 16; ++i) out.at[i] = lanes >> i & 1 ? b.at[i] : a.at[i];
  return vector_of<__m512>(out);
}
inline __m512 _mm512_mask_max_ps(const __m512& old, __mmask16 lanes, const __m512& x,
                                 const __m512& y) {
  return _mm512_mask_mov_ps(old, lanes, _mm512_max_ps(x, y));
}
inline __m512 _mm512_maskz_mul_ps(__mmask16 lanes, const __m512& x, const __m512& y) {
  return _mm512_mask_mov_ps(_mm512_setzero_ps(), lanes, _mm512_mul_ps(x, y));
}
inline __m512 _mm512_maskz_sub_ps(__mmask16 lanes, const __m512& x, const __m512& y) {
  return _mm512_mask_mov_ps(_mm512_setzero_ps(), lanes, _mm512_sub_ps(x, y));
}
inline __m512 _mm512_maskz_compress_ps(__mmask16 lanes, const __m512& x) {
  const auto numbers = numbers_of<float>(x);
  Array<float, 16> out{};
  for (int i = 0, to = 0; i < 16; ++i)
    if (lanes >> i & 1) out.at[to++] = numbers.at[i];
  return vector_of<__m512>(out);
}

enum Comparison { _CMP_EQ_OQ, _CMP_LT_OQ, _CMP_GE_OQ, _CMP_UNORD_Q };
inline __mmask16 _mm512_cmp_ps_mask(const __m512& x, const __m512& y, Comparison how) {
  const auto test = [&](auto f) { return mask_by_lane<__mmask16, float>(f, x, y); };
  switch (how) {
    case _CMP_EQ_OQ: return test([](float a, float b) { return a == b; });
    case _CMP_LT_OQ: return test([](float a, float b) { return a < b; });
    case _CMP_GE_OQ: return test([](float a, float b) { return a >= b; });
    default: return test([](float a, float b) { return a != a || b != b; });
  }
}
inline __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 lanes, const __m512& x, const __m512& y,
                                         Comparison how) {
  return lanes & _mm512_cmp_ps_mask(x, y, how);
}

// A pairwise sum, as GCC's and clang's.
template <typename T, typename Vector>
inline T halve(const Vector& x, T (*f)(T, T)) {
  auto numbers = numbers_of<T>(x);
  for (int count = sizeof(Vector) / sizeof(T) / 2; count; count /= 2)
    for (int i = 0; i < count; ++i) numbers.at[i] = f(numbers.at[i], numbers.at[i + count]);
  return numbers.at[0];
}
inline float _mm512_reduce_add_ps(const __m512& x) {
  return halve<float>(x, [](float a, float b) { return a + b; });
}
inline float _mm512_reduce_max_ps(const __m512& x) {
  return halve<float>(x, [](float a, float b) { return a > b ? a : b; });
}
inline int64_t _mm512_reduce_add_epi64(const __m512i& x) {
  return halve<int64_t>(x, [](int64_t a, int64_t b) { return a + b; });
}

// Conversions.

inline __m512i _mm512_cvttps_epi64(const __m256& x) {
  Array<int64_t, 8> out;
  for (int i = 0; i < 8; ++i) out.at[i] = static_cast<int64_t>(x.lanes[i]);
  return vector_of<__m512i>(out);
}
inline __m512i _mm512_cvttps_epi32(const __m512& x) {
  __m512i out;
  each_part([&](int p) { out.part[p] = __builtin_convertvector(x.part[p], PartI); });
  return out;
}
inline __m512 _mm512_cvtepi32_ps(const __m512i& x) {
  __m512 out;
  each_part([&](int p) { out.part[p] = __builtin_convertvector(x.part[p], PartF); });
  return out;
}
inline __m512i _mm512_cvtepu16_epi32(const __m256i& x) {
  __m512i out;
  each_part([&](int p) {
    PartH half;
    std::memcpy(&half, reinterpret_cast<const char*>(&x.part[p / 2]) + p % 2 * sizeof half, sizeof half);
    out.part[p] = __builtin_convertvector(half, PartI);
  });
  return out;
}
inline __m512i _mm512_cvtepi8_epi32(const __m128i& x) {
  __m512i out;
  each_part([&](int p) {
#ifdef __AVX2__
    typedef char Quarter __attribute__((vector_size(16)));
    typedef int64_t Halves __attribute__((vector_size(16)));
    const Halves bytes = {static_cast<int64_t>(x.lanes[p]), 0};
    out.part[p] = (PartI)__builtin_ia32_pmovsxbd256((Quarter)bytes);
#else
    for (int i = 0; i < PART_LANES; ++i)
      out.part[p][i] = static_cast<int8_t>(x.lanes[p / 2] >> (p % 2 * 32 + i * 8));
#endif
  });
  return out;
}
inline __m512 _mm512_cvtph_ps(const __m256i& x) {
  __m512 out;
#ifdef __F16C__
  typedef short Halves __attribute__((vector_size(16)));
  each_part([&](int p) {
    Halves half;
    std::memcpy(&half, reinterpret_cast<const char*>(&x) + p * sizeof half, sizeof half);
    out.part[p] = __builtin_ia32_vcvtph2ps256(half);
  });
#else
  const __m512i wide = _mm512_cvtepu16_epi32(x);
  each_part([&](int p) {
    const PartI bits = wide.part[p], exponent = bits & 0x7c00;
    const PartF size = (PartF)((bits & 0x7fff) << 13) * 0x1p112f;
    const PartI special = (exponent == 0x7c00) & 0x7f800000;
    out.part[p] = (PartF)((PartI)size | special | (bits & 0x8000) << 16);
  });
#endif
  return out;
}
inline __m512i _mm512_cvtepi8_epi16(const __m256i& x) {
  const auto numbers = numbers_of<int8_t>(x);
  Array<int16_t, 32> out;
  for (int i = 0; i < 32; ++i) out.at[i] = numbers.at[i];
  return vector_of<__m512i>(out);
}
inline __m256i _mm512_cvtepi16_epi8(const __m512i& x) {
  const auto numbers = numbers_of<int16_t>(x);
  Array<int8_t, 32> out;
  for (int i = 0; i < 32; ++i) out.at[i] = static_cast<int8_t>(numbers.at[i]);
  return vector_of<__m256i>(out);
}
// float32 to the nearest bfloat16, in the upper half of each lane; NaN stays NaN.
inline PartU rounded(const PartF& x) {
  const PartU bits = (PartU)x, nearest = bits + 0x7fff + (bits >> 16 & 1);
  return x == x ? nearest : bits | 0x400000;
}
// The upper half of each lane.
#ifdef __AVX2__
inline __m256bh upper_halves(const PartU (&x)[PARTS]) {
  typedef int64_t Quarters __attribute__((vector_size(32)));
  // Packs within 128 bits; the middle quarters change places.
  const Quarters q = (Quarters)__builtin_ia32_packusdw256((PartI)(x[0] >> 16), (PartI)(x[1] >> 16));
  __m256bh out;
  out.bits.part[0] = (PartI)__builtin_shuffle(q, (Quarters){0, 2, 1, 3});
  return out;
}
#else
inline __m256bh upper_halves(const PartU (&x)[PARTS]) {
  __m256bh out;
  each_part([&](int p) {
    const PartH half = __builtin_convertvector(x[p] >> 16, PartH);
    std::memcpy(reinterpret_cast<char*>(&out.bits.part[p / 2]) + p % 2 * sizeof half, &half,
                sizeof half);
  });
  return out;
}
#endif
inline __m256bh _mm512_cvtneps_pbh(const __m512& x) {
  PartU bits[PARTS];
  each_part([&](int p) { bits[p] = rounded(x.part[p]); });
  return upper_halves(bits);
}
inline __m512bh halves_of(const __m256i& low, const __m256i& high) {
  return _mm512_inserti64x4(_mm512_inserti64x4(_mm512_setzero_si512(), low, 0), high, 1);
}
inline __m512bh _mm512_cvtne2ps_pbh(const __m512& high, const __m512& low) {
  return halves_of(_mm512_cvtneps_pbh(low), _mm512_cvtneps_pbh(high));
}
// The same for numbers that bfloat16 has: nothing is rounded.
inline __m512bh narrow_exactly(const __m512& high, const __m512& low) {
  const auto upper = [](const __m512& x) {
    PartU bits[PARTS];
    each_part([&](int p) { bits[p] = (PartU)x.part[p]; });
    return upper_halves(bits);
  };
  return halves_of(upper(low), upper(high));
}

// Integers, and moves of lanes.

inline __m512i _mm512_slli_epi32(const __m512i& x, int by) {
  __m512i out;
  each_part([&](int p) { out.part[p] = x.part[p] << by; });
  return out;
}
inline __m512i _mm512_srlv_epi32(const __m512i& x, const __m512i& by) {
  __m512i out;
  each_part([&](int p) { out.part[p] = (PartI)((PartU)x.part[p] >> (PartU)by.part[p]); });
  return out;
}
inline __m512i _mm512_add_epi64(const __m512i& x, const __m512i& y) {
  return by_lane<int64_t>([](int64_t a, int64_t b) { return a + b; }, x, y);
}
inline __m512i _mm512_srli_epi16(const __m512i& x, int by) {
  __m512i out;
  each_part([&](int p) { out.part[p] = (PartI)((PartW)x.part[p] >> by); });
  return out;
}
inline __m512i _mm512_sub_epi8(const __m512i& x, const __m512i& y) {
  __m512i out;
  each_part([&](int p) { out.part[p] = (PartI)((PartB)x.part[p] - (PartB)y.part[p]); });
  return out;
}
inline __m512i _mm512_min_epu8(const __m512i& x, const __m512i& y) {
  __m512i out;
  each_part([&](int p) {
    const PartB a = (PartB)x.part[p], b = (PartB)y.part[p];
    out.part[p] = (PartI)(a < b ? a : b);
  });
  return out;
}
inline __m256i _mm256_slli_epi16(const __m256i& x, int by) {
  return by_lane<uint16_t>([by](uint16_t v) { return v << by; }, x);
}
inline __m256i _mm256_or_si256(const __m256i& x, const __m256i& y) {
  return by_lane<uint64_t>([](uint64_t a, uint64_t b) { return a | b; }, x, y);
}
inline __mmask64 _mm512_cmpneq_epi8_mask(const __m512i& x, const __m512i& y) {
#ifdef __AVX2__
  __mmask64 mask = 0;
  each_part([&](int p) {
    const auto equal = (PartC)((PartB)x.part[p] == (PartB)y.part[p]);
    mask |= __mmask64{static_cast<uint32_t>(~__builtin_ia32_pmovmskb256(equal))} << 32 * p;
  });
  return mask;
#else
  return mask_by_lane<__mmask64, uint8_t>([](uint8_t a, uint8_t b) { return a != b; }, x, y);
#endif
}
inline __mmask16 _mm512_mask_cmpeq_epi32_mask(__mmask16 lanes, const __m512i& x, const __m512i& y) {
  return lanes &
         mask_by_lane<__mmask16, int32_t>([](int32_t a, int32_t b) { return a == b; }, x, y);
}
inline __m512i _mm512_mask_mov_epi8(const __m512i& old, __mmask64 lanes, const __m512i& x) {
  const auto a = numbers_of<uint8_t>(old), b = numbers_of<uint8_t>(x);
  Array<uint8_t, 64> out;
  for (int i = 0; i < 64; ++i) out.at[i] = lanes >> i & 1 ? b.at[i] : a.at[i];
  return vector_of<__m512i>(out);
}
inline __m512i _mm512_maskz_mov_epi8(__mmask64 lanes, const __m512i& x) {
  return _mm512_mask_mov_epi8(_mm512_setzero_si512(), lanes, x);
}
inline __m512i _mm512_maskz_mov_epi32(__mmask16 lanes, const __m512i& x) {
  const auto numbers = numbers_of<int32_t>(x);
  Array<int32_t, 16> out;
  for (int i = 0; i < 16; ++i) out.at[i] = lanes >> i & 1 ? numbers.at[i] : 0;
  return vector_of<__m512i>(out);
}
// 16-bit numbers with a sign to bytes without, within each 128 bits.
#ifdef __AVX2__
inline __m512i _mm512_packus_epi16(const __m512i& x, const __m512i& y) {
  typedef short Words __attribute__((vector_size(32)));
  __m512i out;
  each_part([&](int p) {
    out.part[p] = (PartI)__builtin_ia32_packuswb256((Words)x.part[p], (Words)y.part[p]);
  });
  return out;
}
#else
inline __m512i _mm512_packus_epi16(const __m512i& x, const __m512i& y) {
  const auto a = numbers_of<int16_t>(x), b = numbers_of<int16_t>(y);
  const auto byte = [](int16_t v) { return static_cast<uint8_t>(v < 0 ? 0 : v > 255 ? 255 : v); };
  Array<uint8_t, 64> out;
  for (int block = 0; block < 4; ++block)
    for (int i = 0; i < 8; ++i) {
      out.at[block * 16 + i] = byte(a.at[block * 8 + i]);
      out.at[block * 16 + 8 + i] = byte(b.at[block * 8 + i]);
    }
  return vector_of<__m512i>(out);
}
#endif
#ifdef __AVX2__
inline __m512i _mm512_shuffle_epi8(const __m512i& x, const __m512i& index) {
  __m512i out;
  each_part([&](int p) {
    out.part[p] = (PartI)__builtin_ia32_pshufb256((PartC)x.part[p], (PartC)index.part[p]);
  });
  return out;
}
#else
inline __m512i _mm512_shuffle_epi8(const __m512i& x, const __m512i& index) {
  const auto from = numbers_of<uint8_t>(x), at = numbers_of<uint8_t>(index);
  Array<uint8_t, 64> out;
  for (int i = 0; i < 64; ++i) out.at[i] = at.at[i] & 128 ? 0 : from.at[i / 16 * 16 + at.at[i] % 16];
  return vector_of<__m512i>(out);
}
#endif
// Takes turns between the lower (or upper) halves of each 128 bits.
template <typename T, int UPPER>
inline __m512i interleave(const __m512i& x, const __m512i& y) {
  constexpr int COUNT = PART_BYTES / sizeof(T), BLOCK = 16 / sizeof(T);
  typedef T Part __attribute__((vector_size(PART_BYTES)));
  Part order;
  for (int i = 0; i < COUNT; ++i) {
    const int in = i % BLOCK / 2 + UPPER * BLOCK / 2 + i / BLOCK * BLOCK;
    order[i] = static_cast<T>(i % 2 ? in + COUNT : in);
  }
  __m512i out;
  each_part([&](int p) {
    out.part[p] = (PartI)__builtin_shuffle((Part)x.part[p], (Part)y.part[p], order);
  });
  return out;
}
#ifdef __AVX2__
// Bytes without a sign times bytes with one; neighbours are added to 16 bits.
inline PartI multiply_bytes(const PartI& x, const PartI& y) {
  return (PartI)__builtin_ia32_pmaddubsw256((PartC)x, (PartC)y);
}
typedef int16_t PartS __attribute__((vector_size(32)));
inline PartI add_int16(const PartI& x, const PartI& y) { return (PartI)((PartS)x + (PartS)y); }
// The sums of neighbours of 16 bits.
inline PartI add_neighbours(const PartI& x) {
  return __builtin_ia32_pmaddwd256((PartS)x, PartS{} + int16_t{1});
}
// Takes turns between the lower, or upper, 16-bit numbers of each 128 bits.
inline PartI unpack_low(const PartI& x, const PartI& y) {
  return (PartI)__builtin_ia32_punpcklwd256((PartS)x, (PartS)y);
}
inline PartI unpack_high(const PartI& x, const PartI& y) {
  return (PartI)__builtin_ia32_punpckhwd256((PartS)x, (PartS)y);
}
#endif
#define WEFT_UNPACK(BITS)                                                           \
  inline __m512i _mm512_unpacklo_epi##BITS(const __m512i& x, const __m512i& y) {    \
    return interleave<int##BITS##_t, 0>(x, y);                                      \
  }                                                                                 \
  inline __m512i _mm512_unpackhi_epi##BITS(const __m512i& x, const __m512i& y) {    \
    return interleave<int##BITS##_t, 1>(x, y);                                      \
  }
WEFT_UNPACK(8)
WEFT_UNPACK(16)
WEFT_UNPACK(32)
WEFT_UNPACK(64)
#undef WEFT_UNPACK
// 128 bits each: two of x, then two of y, that the pairs of bits in `which` name.
#ifdef __AVX2__
inline __attribute__((always_inline)) __m512i _mm512_shuffle_i32x4(const __m512i& x,
                                                                   const __m512i& y, int which) {
  typedef int64_t Quarters __attribute__((vector_size(32)));
  const auto two = [](const __m512i& from, int first, int second) {
    const Quarters order = {2 * first, 2 * first + 1, 2 * second, 2 * second + 1};
    return (PartI)__builtin_shuffle((Quarters)from.part[0], (Quarters)from.part[1], order);
  };
  __m512i out;
  out.part[0] = two(x, which & 3, which >> 2 & 3);
  out.part[1] = two(y, which >> 4 & 3, which >> 6 & 3);
  return out;
}
#else
inline __m512i _mm512_shuffle_i32x4(const __m512i& x, const __m512i& y, int which) {
  const auto a = numbers_of<__m128i>(x), b = numbers_of<__m128i>(y);
  return vector_of<__m512i>(Array<__m128i, 4>{{a.at[which & 3], a.at[which >> 2 & 3],
                                              b.at[which >> 4 & 3], b.at[which >> 6 & 3]}});
}
#endif
inline __m512i _mm512_permutex2var_epi64(const __m512i& x, const __m512i& index, const __m512i& y) {
  const auto a = numbers_of<int64_t>(x), at = numbers_of<int64_t>(index), b = numbers_of<int64_t>(y);
  Array<int64_t, 8> out;
  for (int i = 0; i < 8; ++i) out.at[i] = at.at[i] & 8 ? b.at[at.at[i] & 7] : a.at[at.at[i] & 7];
  return vector_of<__m512i>(out);
}

}  // namespace weft
