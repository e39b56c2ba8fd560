// The largest number of each row, and the first place where it is: greedy sampling.
//
// A row that has NaN gives NaN. Two passes: the second stops where the first has told it to.
#include <limits>

#include "vector.h"

using namespace weft;

namespace {

template <typename Number>
void find_largest(const Number* x, int64_t rows, int64_t n, float* largest, int64_t* index) {
#pragma omp parallel for schedule(dynamic) if (rows > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const Number* row = x + r * n;
    const auto numbers = [&](int64_t i) { return load_any(row + i, first_lanes(n - i)); };
    __m512 top = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 tops[4] = {top, top, top, top};
    __mmask16 nan = 0;
    int64_t at = 0;
    for (; at + 64 <= n; at += 64)
      for (int j = 0; j < 4; ++j) {
        const __m512 v = load_any(row + at + j * 16);
        nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        tops[j] = _mm512_max_ps(tops[j], v);
      }
    for (; at < n; at += 16) {
      const __m512 v = numbers(at);
      nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
      tops[0] = _mm512_mask_max_ps(tops[0], first_lanes(n - at), tops[0], v);
    }
    for (const __m512& part : tops) top = _mm512_max_ps(top, part);
    largest[r] = nan ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(top);
    const __m512 sought = _mm512_set1_ps(largest[r]);
    for (int64_t i = 0; i < n; i += 16) {
      const __m512 v = numbers(i);
      const __mmask16 found = nan ? _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q)
                                  : _mm512_cmp_ps_mask(v, sought, _CMP_EQ_OQ);
      if (const int lanes = found & first_lanes(n - i)) {
        index[r] = i + __builtin_ctz(lanes);
        break;
      }
    }
  }
}

}  // namespace

void weft_argmax(const void* x, int32_t is_float, int64_t rows, int64_t n, float* largest,
                 int64_t* index) {
  if (is_float)
    find_largest(static_cast<const float*>(x), rows, n, largest, index);
  else
    find_largest(static_cast<const bf16*>(x), rows, n, largest, index);
}
