// The weights that tokens are drawn with: whole numbers, so that sums are exact in any order.
//
// A token's does not depend on where in the array it is.
#include "vector.h"

using namespace weft;

void weft_weigh(const float* halvings, int64_t n, int64_t* weights) {
  const __m512 one = _mm512_set1_ps(0x1p40f);
#pragma omp parallel for if (n > 1 << 16)
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = first_lanes(n - i);
    const __m512 x = _mm512_maskz_loadu_ps(lanes, halvings + i);
    const __m512 weight = _mm512_mul_ps(exp2(x), one);
    _mm512_mask_storeu_epi64(weights + i, static_cast<__mmask8>(lanes),
                             _mm512_cvttps_epi64(_mm512_castps512_ps256(weight)));
    _mm512_mask_storeu_epi64(weights + i + 8, static_cast<__mmask8>(lanes >> 8),
                             _mm512_cvttps_epi64(_mm512_extractf32x8_ps(weight, 1)));
  }
}
