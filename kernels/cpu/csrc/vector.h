// What the kernels of this folder are made of: bfloat16, sixteen at a time, and the one product.
//
// A product is a tile of R <= MAX_ROWS rows by COLUMNS columns, held in registers while the
// pairs of k go by: one vdpbf16ps multiplies a pair of a row with a pair of 16 columns and adds
// both to a float32. Its operands are packed so that it reads both from front to back:
//
//   rows     [pairs][R][2]        a pair of each row, broadcast
//   columns  [pairs][COLUMNS][2]  a pair of each column; int8 is widened on the way
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "weft.h"

namespace weft {

constexpr int MAX_ROWS = 12;  // 24 accumulators, two vectors of columns, a row: of 32 registers
constexpr int COLUMNS = 32;

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
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int half = 0; half < 16; half += 8)
    for (int i = half; i < half + 4; ++i) {
      t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    }
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// Rows of 16 pairs -> [pairs][rows][2], what the product reads; `numbers` is overwritten.
inline void store_pairs(__m512i numbers[16], int rows, int pairs, bf16* out) {
  if (rows == 1) {
    _mm512_mask_storeu_epi32(out, first_lanes(pairs), numbers[0]);
    return;
  }
  for (int r = rows; r < 16; ++r) numbers[r] = _mm512_setzero_si512();
  transpose(numbers);
  for (int p = 0; p < pairs; ++p) {
    // What a store has too much of the next ones put right; masks, which cost, are for the end.
    bf16* at = out + 2 * rows * p;
    if (rows * p + 16 <= rows * pairs)
      _mm512_storeu_si512(at, numbers[p]);
    else
      _mm512_mask_storeu_epi32(at, first_lanes(rows), numbers[p]);
  }
}

// 32 numbers of a packed weight, as bfloat16; integers up to 256 are exact in it.
inline __m512bh load_weights(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

inline __m512bh load_weights(const int8_t* p) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16));
  return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high)),
                             _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low)));
}

inline __m512bh broadcast_pair(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// sums [R][COLUMNS] (+)= rows @ columns over `pairs` pairs of k.
//
// Each pair also fetches LINES cache lines from `ahead` on, for weights that come from memory. A
// sum is one chain whatever R is: a row's result must not depend on its company. (One row alone
// waits for each addition, and is still faster than memory.)
template <int R, typename Weight, int LINES>
void multiply_rows(const bf16* rows, const Weight* columns, int64_t pairs, float* sums, bool add,
                   const char* ahead) {
  __m512 sum[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < 2; ++h)
      sum[r][h] = add ? _mm512_loadu_ps(sums + r * COLUMNS + h * 16) : _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; ++p) {
    for (int line = 0; line < LINES; ++line) _mm_prefetch(ahead + 64 * line, _MM_HINT_T0);
    ahead += 64 * LINES;
    const __m512bh left = load_weights(columns), right = load_weights(columns + 32);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512bh row = broadcast_pair(rows + 2 * r);
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], row, left);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], row, right);
    }
    rows += 2 * R;
    columns += 2 * COLUMNS;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < 2; ++h) _mm512_storeu_ps(sums + r * COLUMNS + h * 16, sum[r][h]);
}

template <int LINES, typename Weight, int... R>
void multiply(std::integer_sequence<int, R...>, int r, const bf16* rows, const Weight* columns,
              int64_t pairs, float* sums, bool add, const char* ahead) {
  using Kernel = void (*)(const bf16*, const Weight*, int64_t, float*, bool, const char*);
  static constexpr Kernel kernels[] = {multiply_rows<R + 1, Weight, LINES>...};
  kernels[r - 1](rows, columns, pairs, sums, add, ahead);
}

template <int LINES = 0, typename Weight>
void multiply(int r, const bf16* rows, const Weight* columns, int64_t pairs, float* sums, bool add,
              const char* ahead = nullptr) {
  multiply<LINES>(std::make_integer_sequence<int, MAX_ROWS>{}, r, rows, columns, pairs, sums, add,
                  ahead);
}

}  // namespace weft
