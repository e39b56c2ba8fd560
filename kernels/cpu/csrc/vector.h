// What the kernels of this folder are made of: bfloat16, sixteen at a time, and the one product.
//
// A product is a tile of R <= MAX_ROWS rows by COLUMNS columns, held in registers while the
// pairs of k go by: one vdpbf16ps multiplies a pair of a row with a pair of 16 columns and adds
// both to a float32. Its operands are packed so that it reads both from front to back:
//
//   rows     [pairs][R][2]        a pair of each row, broadcast
//   columns  [pairs][COLUMNS][2]  a pair of each column; int8 and compressed numbers are widened
//                                 on the way
#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>
#define WEFT_PORTABLE 0
#else
#include "portable.h"
#define WEFT_PORTABLE 1
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "weft.h"

namespace weft {

// 20 accumulators, two vectors of columns and one row, of 32 registers. With 12 rows, products take
// no less time for each, and leave none in which to widen columns. Of 16 registers of half the size,
// 6 rows are the best, although their sums do not all stay in registers.
constexpr int MAX_ROWS = WEFT_PORTABLE ? 6 : 10;
constexpr int COLUMNS = 32;

// Products with int4 columns round their rows to int8, where there is an instruction for such
// products but none for bfloat16.
#if WEFT_PORTABLE && defined(__AVX2__)
#define WEFT_INTEGER_ROWS 1
#else
#define WEFT_INTEGER_ROWS 0
#endif
constexpr bool INTEGER_ROWS = WEFT_INTEGER_ROWS;

inline __m512 widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline __mmask16 first_lanes(int64_t n) {
  return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
}

inline __m512 load_bf16(const bf16* p, __mmask16 lanes = 0xffff) {
  return widen(_mm256_maskz_loadu_epi16(lanes, p));
}

inline __m512 load_float16(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}

inline __m512 load_int8(const void* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}

template <typename Number>
__m512 load_any(const Number* p, __mmask16 lanes = 0xffff);
template <>
inline __m512 load_any(const bf16* p, __mmask16 lanes) {
  return load_bf16(p, lanes);
}
template <>
inline __m512 load_any(const float* p, __mmask16 lanes) {
  return _mm512_maskz_loadu_ps(lanes, p);
}

inline void store_bf16(bf16* p, __m512 x, __mmask16 lanes = 0xffff) {
  _mm256_mask_storeu_epi16(p, lanes, narrow(x));
}

// 2 to the x, 4e-7 relative; 0 far below the smallest float32, NaN for NaN.
inline __m512 exp2(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.f), x);  // the second one, if either is NaN
  const __m512 n = _mm512_roundscale_ps(x, 0);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(1.3333558e-3f);  // ln(2)^i / i!, from the fifth on down
  for (float c : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, n);
}

constexpr float LOG2_E = 1.44269504f;

inline __m512 silu(__m512 x) {
  const __m512 e = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.f), e));
}

// rows[i][j] <-> rows[j][i], of 32-bit numbers: pairs of bfloat16.
inline void transpose(__m512i rows[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
#pragma GCC unroll 2
  for (int half = 0; half < 16; half += 8)
#pragma GCC unroll 4
    for (int i = half; i < half + 4; ++i) {
      t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// Calls f with `rows`, from 1 to MAX_ROWS, as a constant of the compiler.
template <typename F, int... R>
inline void with_rows(std::integer_sequence<int, R...>, int rows, F f) {
  ((rows == R + 1 ? f(std::integral_constant<int, R + 1>{}) : void()), ...);
}

template <typename F>
inline void with_rows(int rows, F f) {
  with_rows(std::make_integer_sequence<int, MAX_ROWS>{}, rows, f);
}

// R rows of 16 pairs -> [pairs][R][2], what the product reads. All loops are unrolled: numbers that
// stay in registers take half the time.
template <int R>
inline void store_pairs(const __m512i* numbers, int pairs, bf16* out) {
  if constexpr (R == 1) {
    _mm512_mask_storeu_epi32(out, first_lanes(pairs), numbers[0]);
    return;
  }
  __m512i columns[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) columns[r] = r < R ? numbers[r] : _mm512_setzero_si512();
  transpose(columns);
  // What a store has too much of the next ones put right; masks, which cost, are for the end.
#pragma GCC unroll 16
  for (int p = 0; p < 16; ++p) {
    if (pairs == 16 && R * p + 16 <= R * 16)
      _mm512_storeu_si512(out + 2 * R * p, columns[p]);
    else if (p < pairs)
      _mm512_mask_storeu_epi32(out + 2 * R * p, first_lanes(R), columns[p]);
  }
}

// How the columns of a product are stored: PAIR bytes for each pair of k. `load` gives those of
// the first 16 columns and of the last 16, as bfloat16. With groups, each GROUP pairs of k are
// stored after their scales, SCALES bytes: a float16 for each column, and with ZEROS an int8.
struct UngroupedColumns {
  static constexpr int64_t GROUP = 0, SCALES = 0;
  static constexpr bool ZEROS = false, INTEGERS = false;
};

struct PlainColumns : UngroupedColumns {
  static constexpr int64_t PAIR = COLUMNS * 2 * sizeof(bf16);

  void load(const char* at, __m512bh& left, __m512bh& right) const {
    left = (__m512bh)_mm512_loadu_si512(at);
    right = (__m512bh)_mm512_loadu_si512(at + 64);
  }
};

#if !WEFT_PORTABLE
// Two vectors of numbers that bfloat16 has.
inline __m512bh narrow_exactly(__m512 high, __m512 low) { return _mm512_cvtne2ps_pbh(high, low); }
#endif

struct Int8Columns : UngroupedColumns {  // integers up to 256 are exact in bfloat16
  static constexpr int64_t PAIR = COLUMNS * 2;

  void load(const char* at, __m512bh& left, __m512bh& right) const {
    left = half(at);
    right = half(at + 32);
  }

 private:
  static __m512bh half(const char* at) {
    const __m128i* p = reinterpret_cast<const __m128i*>(at);
    return narrow_exactly(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p + 1))),
                          _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p))));
  }
};

// Four bits for each of 64 numbers, in 32 bytes, and back: a byte each, so that unpacklo and
// unpackhi with another vector give the left numbers and the right ones.
inline __m512i unpack_codes(const char* at) {
  const __m512i codes =
      _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(4), 1);
  return _mm512_and_si512(_mm512_srlv_epi32(codes, shifts), _mm512_set1_epi8(15));
}

inline void join_codes(__m512i codes, char* at) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at),
                      _mm256_or_si256(_mm512_castsi512_si256(codes),
                                      _mm256_slli_epi16(_mm512_extracti64x4_epi64(codes, 1), 4)));
}

// Integers from -8 to 7 as codes from 0 to 15, with a scale for each group of 32 along k. Shuffles
// look up the two bytes of each as bfloat16, which is exact; scales multiply the group's sums. A
// zero point times the sum of a row's group is subtracted from them first. With INTEGER_ROWS, codes
// multiply rows that are rounded to int8 in the same groups, as in llama.cpp's Q8_0.
template <bool HAS_ZEROS>
struct Int4Columns {
  static constexpr int64_t PAIR = COLUMNS, GROUP = 16, SCALES = COLUMNS * (2 + HAS_ZEROS);
  static constexpr bool ZEROS = HAS_ZEROS, INTEGERS = INTEGER_ROWS;

  Int4Columns() {
    alignas(16) uint8_t lower[16], upper[16];
    for (int code = 0; code < 16; ++code) {
      const float number = static_cast<float>(code - 8);
      uint32_t bits;
      std::memcpy(&bits, &number, sizeof bits);
      lower[code] = static_cast<uint8_t>(bits >> 16);
      upper[code] = static_cast<uint8_t>(bits >> 24);
    }
    lower_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<__m128i*>(lower)));
    upper_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<__m128i*>(upper)));
  }

  void load(const char* at, __m512bh& left, __m512bh& right) const {
    const __m512i code = unpack_codes(at);
    const __m512i lower = _mm512_shuffle_epi8(lower_, code);
    const __m512i upper = _mm512_shuffle_epi8(upper_, code);
    left = (__m512bh)_mm512_unpacklo_epi8(lower, upper);
    right = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
  }

 private:
  __m512i lower_, upper_;  // the bytes that each code stands for
};

// Columns of any kind after `widen`: bfloat16 numbers, in the same groups.
template <typename Columns>
struct Widened : PlainColumns {
  static constexpr int64_t GROUP = Columns::GROUP, SCALES = Columns::SCALES;
  static constexpr bool ZEROS = Columns::ZEROS, INTEGERS = false;
};

// Where a pair of k is in a panel. It must be a group's first one, if there are groups.
template <typename Columns>
constexpr int64_t offset_of(int64_t pair) {
  return pair * Columns::PAIR + (Columns::GROUP ? ceil_div(pair, Columns::GROUP) : 0) * Columns::SCALES;
}

// A panel's bytes; its last group is whole.
template <typename Columns>
constexpr int64_t panel_bytes(int64_t pairs) {
  return offset_of<Columns>(Columns::GROUP ? ceil_div(pairs, Columns::GROUP) * Columns::GROUP : pairs);
}

// Bytes for each pair, scales included: what is fetched ahead.
template <typename Columns>
constexpr int64_t FETCHED = Columns::PAIR + (Columns::GROUP ? Columns::SCALES / Columns::GROUP : 0);

// bfloat16 in 12 bits. The upper seven bits of nearly all exponents of a matrix are among some
// seven neighbours, so that four bits name them and the sign: codes 0 to 6 are top - code, 7 is
// zero, and 8 to 15 are top - (code - 8) of negative numbers. A pair is 32 bytes of codes, then 64
// of what is left of the numbers. A number that has no code is an escape: zero here, and in a list
// of its own.
struct CompressedColumns : UngroupedColumns {
  static constexpr int64_t PAIR = COLUMNS * 3;
  static constexpr int CODES = 7;

  explicit CompressedColumns(int top) {
    alignas(16) uint8_t upper[16];
    for (int code = 0; code < 16; ++code) upper[code] = upper_byte(code, top);
    upper_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<__m128i*>(upper)));
    top_ = _mm512_set1_epi8(static_cast<char>(top));
  }

  void load(const char* at, __m512bh& left, __m512bh& right) const {
    const __m512i code = unpack_codes(at);
    const __m512i upper = _mm512_shuffle_epi8(upper_, code), lower = _mm512_loadu_si512(at + 32);
    left = (__m512bh)_mm512_unpacklo_epi8(lower, upper);
    right = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
  }

  // What `load` takes apart. Returns a bit for each number whose upper byte no code gives back, by
  // its place; `load` makes it 0.
  uint64_t store(__m512i left, __m512i right, char* at) const {
    const __m512i byte = _mm512_set1_epi16(0xff);
    __m512i lower =
        _mm512_packus_epi16(_mm512_and_si512(left, byte), _mm512_and_si512(right, byte));
    const __m512i upper = _mm512_packus_epi16(_mm512_srli_epi16(left, 8), _mm512_srli_epi16(right, 8));
    const __m512i none = _mm512_set1_epi8(CODES);
    const __m512i exponent = _mm512_and_si512(upper, _mm512_set1_epi8(0x7f));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(upper, 4), _mm512_set1_epi8(8));
    __m512i code = _mm512_or_si512(_mm512_min_epu8(_mm512_sub_epi8(top_, exponent), none), sign);
    const uint64_t escapes = _mm512_cmpneq_epi8_mask(_mm512_shuffle_epi8(upper_, code), upper);
    if (escapes) {
      code = _mm512_mask_mov_epi8(code, escapes, none);
      lower = _mm512_maskz_mov_epi8(~escapes, lower);
    }
    join_codes(code, at);
    _mm512_storeu_si512(at + 32, lower);
    return escapes;
  }

  // The column of a place, and 0 or 1 for the first or the second number of the pair: unpack takes
  // turns between eight numbers of the left columns and eight of the right ones.
  static int column_of(int place) { return place / 8 % 2 * 16 + place / 16 * 4 + place % 8 / 2; }
  static int which_of(int place) { return place % 2; }

  // The number of a pair in a column, 0 or 1 for the first or the second of the pair.
  static bf16 number(const char* at, int column, int which, int top) {
    const int place = column % 16 / 4 * 16 + column / 16 * 8 + column % 4 * 2 + which;
    const int code = static_cast<uint8_t>(at[place % 32]) >> place / 32 * 4 & 15;
    return static_cast<bf16>(upper_byte(code, top) << 8 | static_cast<uint8_t>(at[32 + place]));
  }

 private:
  static uint8_t upper_byte(int code, int top) {
    const int exponent = code == CODES ? 0 : std::max(top - code % 8, 0);
    return static_cast<uint8_t>(code / 8 << 7 | exponent);
  }

  __m512i upper_;  // the upper byte that each code stands for
  __m512i top_;    // the highest exponent with a code, in each byte
};

inline __m512bh broadcast_pair(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// sums [R][COLUMNS] (+)= rows @ columns over `pairs` pairs of k.
//
// Each pair also fetches the cache lines of AHEAD bytes from `ahead` on, for weights that come from
// memory. A sum is one chain whatever R is: a row's result must not depend on its company. (One
// row alone waits for each addition, and is still faster than memory.)
//
// A group's sum is multiplied by its scales, and added to the sum of the groups before. With zero
// points, of_rows [groups][R] are the sums of each row's numbers.
template <int R, int64_t AHEAD, typename Columns>
void multiply_rows(const bf16* rows, const Columns& kind, const char* columns, int64_t pairs,
                   float* sums, bool add, const char* ahead, const float* of_rows) {
  __m512 sum[R][2];
  const auto add_pairs = [&](int64_t count) {
    for (int64_t p = 0; p < count; ++p) {
      for (int64_t line = 0; line < AHEAD; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T0);
      ahead += AHEAD;
      __m512bh left, right;
      kind.load(columns, left, right);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const __m512bh row = broadcast_pair(rows + 2 * r);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], row, left);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], row, right);
      }
      rows += 2 * R;
      columns += Columns::PAIR;
    }
  };
  if constexpr (Columns::GROUP == 0) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < 2; ++h)
        sum[r][h] = add ? _mm512_loadu_ps(sums + r * COLUMNS + h * 16) : _mm512_setzero_ps();
    add_pairs(pairs);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < 2; ++h) _mm512_storeu_ps(sums + r * COLUMNS + h * 16, sum[r][h]);
  } else {
    for (int64_t pair = 0; pair < pairs; pair += Columns::GROUP) {
      const char* scales = columns;
      columns += Columns::SCALES;
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h)
          sum[r][h] = Columns::ZEROS ? _mm512_mul_ps(_mm512_set1_ps(-of_rows[r]),
                                                     load_int8(scales + COLUMNS * 2 + h * 16))
                                     : _mm512_setzero_ps();
      if (Columns::ZEROS) of_rows += R;
      add_pairs(std::min(Columns::GROUP, pairs - pair));
      const __m512 scale[2] = {load_float16(scales), load_float16(scales + 32)};
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) {
          float* total = sums + r * COLUMNS + h * 16;
          const __m512 before = add || pair ? _mm512_loadu_ps(total) : _mm512_setzero_ps();
          _mm512_storeu_ps(total, _mm512_fmadd_ps(sum[r][h], scale[h], before));
        }
    }
  }
}

#if WEFT_INTEGER_ROWS
// A row's group of 32 bfloat16, as pairs -> integers from -127 to 127 times a scale, as two equal
// pairs of bytes each; and their sum. Numbers that are not finite make the scale NaN.
inline __m512i round_row(const __m512i& numbers, float& scale, float& sum) {
  __m512 part[2];
  each_part([&](int p) {
    part[0].part[p] = (PartF)(numbers.part[p] << 16);
    part[1].part[p] = (PartF)(numbers.part[p] & static_cast<int32_t>(0xffff0000u));
  });
  PartF largest{}, total{};
  for (const __m512& of : part)
    each_part([&](int p) {
      const PartF size = (PartF)((PartI)of.part[p] & 0x7fffffff);
      largest = size > largest ? size : largest;
      total += size;
    });
  float most = 0, finite = 0;
  for (int i = 0; i < PART_LANES; ++i) most = std::max(most, largest[i]), finite += total[i];
  const float factor = most > 1e-30f ? 127.f / most : 0.f;
  PartI integers{};
  __m512i out;
  each_part([&](int p) {
    // In the last bits of a float32 of this size, integers are rounded to the nearest.
    constexpr float SHIFT = 3 << 22;
    const auto nearest = [&](PartF x) { return (PartI)(x * factor + SHIFT) - (PartI)(PartF{} + SHIFT); };
    const PartI first = nearest(part[0].part[p]), second = nearest(part[1].part[p]);
    integers += first + second;
    const PartI pair = (first & 0xff) | (second & 0xff) << 8;
    out.part[p] = pair | pair << 16;
  });
  int32_t count = 0;
  for (int i = 0; i < PART_LANES; ++i) count += integers[i];
  sum = static_cast<float>(count);
  scale = finite - finite == 0 ? most / 127.f : finite - finite;
  return out;
}

// `multiply_rows` for integers: rows as `round_row` makes them, and of_rows [groups][2][R], scales and
// sums. Sixteen products of 15 and 127 fit in 16 bits: a group's pairs are added up in two halves.
template <int R, int64_t AHEAD, typename Columns>
void multiply_integers(const bf16* rows, const char* columns, int64_t pairs, float* sums, bool add,
                       const char* ahead, const float* of_rows) {
  constexpr int64_t HALF = Columns::GROUP / 2;
  for (int64_t pair = 0; pair < pairs; pair += Columns::GROUP) {
    const char* scales = columns;
    columns += Columns::SCALES;
    PartI sum[2][R][2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int64_t count = std::max<int64_t>(0, std::min(HALF, pairs - pair - half * HALF));
      const auto add_pairs = [&](auto first, auto last, auto fetched) {
        constexpr int FIRST = first(), LAST = last();
        PartI local[LAST - FIRST][2];
#pragma GCC unroll 12
        for (int r = FIRST; r < LAST; ++r) local[r - FIRST][0] = local[r - FIRST][1] = PartI{};
        for (int64_t p = 0; p < count; ++p) {
          for (int64_t line = 0; line < fetched(); line += 64)
            _mm_prefetch(ahead + p * AHEAD + line, _MM_HINT_T0);
          const PartI codes =
              reinterpret_cast<const Unaligned<PartI>*>(columns + p * Columns::PAIR)->part;
          const PartI low = codes & 0x0f0f0f0f, high = (codes >> 4) & 0x0f0f0f0f;
#pragma GCC unroll 12
          for (int r = FIRST; r < LAST; ++r) {
            int32_t both;
            std::memcpy(&both, rows + 2 * (p * R + r), sizeof both);
            const PartI row = PartI{} + both;
            PartI(&to)[2] = local[r - FIRST];
            to[0] = add_int16(to[0], multiply_bytes(low, row));
            to[1] = add_int16(to[1], multiply_bytes(high, row));
          }
        }
#pragma GCC unroll 12
        for (int r = FIRST; r < LAST; ++r)
          for (int i = 0; i < 2; ++i) sum[half][r][i] = local[r - FIRST][i];
      };
      // Of more than four rows, sums do not all stay in registers.
      constexpr int MIDDLE = R > 4 ? R / 2 : R;
      using std::integral_constant;
      add_pairs(integral_constant<int, 0>{}, integral_constant<int, MIDDLE>{},
                integral_constant<int64_t, AHEAD>{});
      if constexpr (MIDDLE < R)
        add_pairs(integral_constant<int, MIDDLE>{}, integral_constant<int, R>{},
                  integral_constant<int64_t, 0>{});
      ahead += count * AHEAD;
      rows += count * 2 * R;
      columns += count * Columns::PAIR;
    }
    const __m512 scale[2] = {load_float16(scales), load_float16(scales + 32)};
    __m512 zero[2];
    for (int h = 0; h < 2; ++h) {
      zero[h] = _mm512_set1_ps(8);
      if (Columns::ZEROS) zero[h] = _mm512_add_ps(zero[h], load_int8(scales + COLUMNS * 2 + h * 16));
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const PartF row_scale = PartF{} + of_rows[r], row_sum = PartF{} - of_rows[R + r];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        // Bytes alternate between eight of the left columns and eight of the right ones.
        const int h = i / 2, p = i % 2;
        const PartF whole = __builtin_convertvector(
            add_neighbours(h ? unpack_high(sum[0][r][p], sum[1][r][p])
                             : unpack_low(sum[0][r][p], sum[1][r][p])), PartF);
        auto* total = reinterpret_cast<Unaligned<PartF>*>(sums + r * COLUMNS + h * 16 + p * 8);
        const PartF before = add || pair ? total->part : PartF{};
        total->part = fused(fused(row_sum, zero[h].part[p], whole), scale[h].part[p] * row_scale,
                            before);
      }
    }
    of_rows += 2 * R;
  }
}
#endif

// Pairs of a panel, from a group's first one on -> Widened<Columns>, for products that use them
// many times.
template <typename Columns>
void widen(const Columns& kind, const char* from, int64_t pairs, char* to) {
  const int64_t group = Columns::GROUP ? Columns::GROUP : pairs;
  for (int64_t first = 0; first < pairs; first += group) {
    std::memcpy(to, from, Columns::SCALES);
    from += Columns::SCALES;
    to += Columns::SCALES;
    for (int64_t pair = first; pair < std::min(first + group, pairs); ++pair) {
      __m512bh left, right;
      kind.load(from, left, right);
      _mm512_storeu_si512(to, (__m512i)left);
      _mm512_storeu_si512(to + 64, (__m512i)right);
      from += Columns::PAIR;
      to += PlainColumns::PAIR;
    }
  }
}

template <int64_t AHEAD, typename Columns, int... R>
void multiply(std::integer_sequence<int, R...>, int r, const bf16* rows, const Columns& kind,
              const char* columns, int64_t pairs, float* sums, bool add, const char* ahead,
              const float* of_rows) {
#if WEFT_INTEGER_ROWS
  if constexpr (Columns::INTEGERS) {
    using Kernel =
        void (*)(const bf16*, const char*, int64_t, float*, bool, const char*, const float*);
    static constexpr Kernel kernels[] = {multiply_integers<R + 1, AHEAD, Columns>...};
    return kernels[r - 1](rows, columns, pairs, sums, add, ahead, of_rows);
  }
#endif
  using Kernel = void (*)(const bf16*, const Columns&, const char*, int64_t, float*, bool,
                          const char*, const float*);
  static constexpr Kernel kernels[] = {multiply_rows<R + 1, AHEAD, Columns>...};
  kernels[r - 1](rows, kind, columns, pairs, sums, add, ahead, of_rows);
}

template <int64_t AHEAD = 0, typename Columns>
void multiply(int r, const bf16* rows, const Columns& kind, const char* columns, int64_t pairs,
              float* sums, bool add, const char* ahead = nullptr,
              const float* of_rows = nullptr) {
  multiply<AHEAD>(std::make_integer_sequence<int, MAX_ROWS>{}, r, rows, kind, columns, pairs, sums,
                  add, ahead, of_rows);
}

inline void multiply(int r, const bf16* rows, const bf16* columns, int64_t pairs, float* sums,
                     bool add) {
  multiply(r, rows, PlainColumns{}, reinterpret_cast<const char*>(columns), pairs, sums, add);
}

}  // namespace weft
