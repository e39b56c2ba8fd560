// Tokens drawn at random, one for each row of logits: what models/torch/draw.py computes, bit for
// bit, in few passes over a row.
//
// A row is cut into blocks of 64 tokens. The first pass keeps each block's largest logit. Later
// passes then skip blocks without a token that counts:
//
//   top-k    The k-th largest of the blocks' maxima is at most the k-th largest logit. So only
//            logits from there on are collected, some hundreds, and sorted.
//   top-p    The sum of all weights takes a pass, which keeps them. If the likeliest tokens of some
//            hundred blocks do not reach the mass, a sample of the blocks tells from where on tokens
//            probably do. Their weights are added up by range, and the range that decides is sorted.
//   draw     A pass over the kept tokens leaves each block's sum, which finds the block, then the
//            token.
//
// Weights are whole numbers, so their sums are exact in any order; see weigh.cpp.
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "vector.h"

using namespace weft;

namespace {

constexpr int64_t BLOCK = 64;
constexpr int64_t WIDE = 256;    // blocks from which the nucleus is collected first
constexpr int64_t SAMPLED = 16;  // one block of so many is in the sample
constexpr int RANGES = 4096;     // of the logarithms of weights
constexpr float LOWEST = -42.f;  // below it, a weight is 0
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// The part of a total that fits a fraction in units of 2^-48, rounded down.
int64_t share(int64_t fraction, int64_t total) {
  return static_cast<int64_t>((static_cast<__int128>(fraction) * total) >> 48);
}

__m512i low_weights(__m512 weight) {
  return _mm512_cvttps_epi64(_mm512_castps512_ps256(weight));
}
__m512i high_weights(__m512 weight) {
  return _mm512_cvttps_epi64(_mm512_extractf32x8_ps(weight, 1));
}

struct Scratch {
  std::vector<float> tops;       // of each block, scaled
  std::vector<float> ordered;    // the same, in another order
  std::vector<float> scaled;     // of each token, if stored
  std::vector<float> weighed;    // whole numbers, if stored
  std::vector<float> collected;  // scaled logits
  std::vector<int64_t> weights;  // theirs
  std::vector<int64_t> sums;     // of each block
  std::vector<int64_t> masses;   // of each range
};

template <typename Number>
class Row {
 public:
  Row(const Number* logits, int64_t n, const Draw& draw, Scratch& scratch)
      : logits_(logits), n_(n), draw_(draw), scratch_(scratch), blocks_((n + BLOCK - 1) / BLOCK) {
    scratch_.tops.resize(blocks_);
    float* tops = scratch_.tops.data();
    largest_ = -INFINITE;
    for (int64_t b = 0; b < blocks_; ++b) {
      const int64_t i = b * BLOCK;
      __m512 top = _mm512_set1_ps(-INFINITE);
      if (i + BLOCK <= n_) {
        const __m512 low = _mm512_max_ps(load_any(logits_ + i), load_any(logits_ + i + 16));
        const __m512 high = _mm512_max_ps(load_any(logits_ + i + 32), load_any(logits_ + i + 48));
        top = _mm512_max_ps(low, high);
      } else {
        for (int64_t j = i; j < n_; j += 16) {
          const __mmask16 lanes = first_lanes(n_ - j);
          top = _mm512_mask_max_ps(top, lanes, top, load_any(logits_ + j, lanes));
        }
      }
      tops[b] = _mm512_reduce_max_ps(top);
      largest_ = std::max(largest_, tops[b]);
    }
    if (largest_ == -INFINITE) largest_ = 0.f;
    for (int64_t b = 0; b < blocks_; ++b) tops[b] = scale(tops[b]);
  }

  int64_t token() {
    float floor = -INFINITE;
    if (draw_.top_k < n_) floor = kth();
    if (draw_.tail > 0) floor = std::max(floor, nucleus(floor));
    floor = std::max(floor, draw_.min_log_weight);
    return pick(floor);
  }

 private:
  float scale(float logit) const { return (logit - largest_) / draw_.temperature; }

  __m512 scaled(int64_t i, __mmask16 lanes) const {
    if (stored_) return _mm512_maskz_loadu_ps(lanes, scratch_.scaled.data() + i);
    const __m512 shifted = _mm512_sub_ps(load_any(logits_ + i, lanes), _mm512_set1_ps(largest_));
    return _mm512_div_ps(shifted, _mm512_set1_ps(draw_.temperature));
  }

  // Weights of these lanes, as whole numbers; other lanes are 0.
  __m512 weigh(int64_t i, __mmask16 lanes, __m512 x) const {
    if (stored_) return _mm512_maskz_loadu_ps(lanes, scratch_.weighed.data() + i);
    return weight_of(lanes, x);
  }

  static __m512 weight_of(__mmask16 lanes, __m512 x) {
    const __m512 weight = _mm512_maskz_mul_ps(lanes, exp2(x), _mm512_set1_ps(0x1p40f));
    return _mm512_roundscale_ps(weight, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  }

  // Keeps all scaled logits and weights, for the passes to come; returns the weights' sum.
  int64_t store() {
    scratch_.scaled.resize(n_);
    scratch_.weighed.resize(n_);
    __m512i total = _mm512_setzero_si512();
    for (int64_t i = 0; i < n_; i += 16) {
      const __mmask16 inside = first_lanes(n_ - i);
      const __m512 x = scaled(i, inside);
      const __mmask16 lanes =
          _mm512_mask_cmp_ps_mask(inside, x, _mm512_set1_ps(LOWEST), _CMP_GE_OQ);
      const __m512 weight = weigh(i, lanes, x);
      _mm512_mask_storeu_ps(scratch_.scaled.data() + i, inside, x);
      _mm512_mask_storeu_ps(scratch_.weighed.data() + i, inside, weight);
      total = _mm512_add_epi64(total, low_weights(weight));
      total = _mm512_add_epi64(total, high_weights(weight));
    }
    stored_ = true;
    return _mm512_reduce_add_epi64(total);
  }

  // Calls use(first token, lanes, scaled) for all lanes at or above the floor.
  template <typename Use>
  void each(float floor, const Use& use) const {
    const __m512 floors = _mm512_set1_ps(floor);
    for (int64_t b = 0; b < blocks_; ++b) {
      if (!(scratch_.tops[b] >= floor)) continue;
      for (int64_t i = b * BLOCK; i < std::min(n_, (b + 1) * BLOCK); i += 16) {
        const __mmask16 inside = first_lanes(n_ - i);
        const __m512 x = scaled(i, inside);
        const __mmask16 lanes = _mm512_mask_cmp_ps_mask(inside, x, floors, _CMP_GE_OQ);
        if (lanes) use(i, lanes, x);
      }
    }
  }

  // The count-th largest of the blocks' maxima, at most the count-th largest number; -inf if there
  // are fewer blocks.
  float bound(int64_t count) {
    if (count > blocks_) return -INFINITE;
    scratch_.ordered = scratch_.tops;
    auto at = scratch_.ordered.begin() + (count - 1);
    std::nth_element(scratch_.ordered.begin(), at, scratch_.ordered.end(), std::greater<float>());
    return *at;
  }

  void clear() {
    scratch_.collected.resize(n_ + 16);
    count_ = 0;
  }

  void keep(__mmask16 lanes, __m512 x) {
    // Compressing to memory takes AMD's CPUs a hundred cycles.
    _mm512_storeu_ps(scratch_.collected.data() + count_, _mm512_maskz_compress_ps(lanes, x));
    count_ += __builtin_popcount(lanes);
  }

  // All numbers from the floor on.
  void collect(float floor) {
    clear();
    each(floor, [&](int64_t, __mmask16 lanes, __m512 x) { keep(lanes, x); });
  }

  float kth() {
    collect(bound(draw_.top_k));
    auto begin = scratch_.collected.begin(), at = begin + (draw_.top_k - 1);
    std::nth_element(begin, at, begin + count_, std::greater<float>());
    return *at;
  }

  int64_t sum(float floor) const {
    __m512i total = _mm512_setzero_si512();
    each(std::max(floor, LOWEST), [&](int64_t i, __mmask16 lanes, __m512 x) {
      const __m512 weight = weigh(i, lanes, x);
      total = _mm512_add_epi64(total, low_weights(weight));
      total = _mm512_add_epi64(total, high_weights(weight));
    });
    return _mm512_reduce_add_epi64(total);
  }

  // The largest number such that it and all larger ones have the nucleus' mass.
  float nucleus(float floor) {
    const int64_t total = floor == -INFINITE ? store() : sum(floor);
    const int64_t mass = std::min(std::max<int64_t>(total - share(draw_.tail, total), 1), total);
    if (mass <= 0) return -INFINITE;
    const float likeliest = bound(std::min(WIDE, blocks_));
    // With top-k, its candidates are all there is.
    collect(floor > -INFINITE ? floor : likeliest);
    float found;
    const int64_t head = reaches(mass, found);
    if (head >= mass) return found;
    const float likely = likely_floor(likeliest, mass - head, total - head);
    if (by_range(likely, mass, found) < mass) by_range(LOWEST, mass, found);
    return found;
  }

  // The sum of the weights of what was collected. If it reaches the mass: with which number.
  int64_t reaches(int64_t mass, float& found) {
    float* numbers = scratch_.collected.data();
    scratch_.weights.resize(count_);
    const auto weigh_all = [&] { weft_weigh(numbers, count_, scratch_.weights.data()); };
    weigh_all();
    int64_t sum = 0;
    for (const int64_t weight : scratch_.weights) sum += weight;
    if (sum < mass) return sum;
    std::sort(numbers, numbers + count_, std::greater<float>());
    weigh_all();
    int64_t left = mass, i = -1;
    while (left > 0) left -= scratch_.weights[++i];
    found = numbers[i];
    return sum;
  }

  static __m512i range_of(__m512 x) {
    const __m512 place = _mm512_mul_ps(x, _mm512_set1_ps(RANGES / LOWEST));
    return _mm512_min_epi32(_mm512_cvttps_epi32(place), _mm512_set1_epi32(RANGES - 1));
  }

  // Adds weights to the masses of their ranges.
  void add(__mmask16 lanes, __m512 x, __m512 weight) {
    alignas(64) int32_t range[16];
    alignas(64) int64_t weights[16];
    _mm512_store_si512(range, _mm512_maskz_mov_epi32(lanes, range_of(x)));
    _mm512_store_si512(weights, low_weights(weight));
    _mm512_store_si512(weights + 8, high_weights(weight));
    for (int lane = 0; lane < 16; ++lane) scratch_.masses[range[lane]] += weights[lane];
  }

  // From where on tokens probably have the mass, and a quarter of what the nucleus leaves out: by
  // the weights in a sample of the blocks. Tokens from `head` on do not count.
  float likely_floor(float head, int64_t mass, int64_t total) {
    scratch_.masses.assign(RANGES, 0);
    for (int64_t i = 0; i + BLOCK <= n_; i += BLOCK * SAMPLED)
      for (int64_t j = i; j < i + BLOCK; j += 16) {
        const __m512 x = scaled(j, first_lanes(BLOCK));
        const __mmask16 lanes = _mm512_cmp_ps_mask(x, _mm512_set1_ps(LOWEST), _CMP_GE_OQ) &
                                _mm512_cmp_ps_mask(x, _mm512_set1_ps(head), _CMP_LT_OQ);
        if (lanes) add(lanes, x, weigh(j, lanes, x));
      }
    int64_t sampled = 0, above = 0;
    for (const int64_t each : scratch_.masses) sampled += each;
    const double wanted = (0.25 + 0.75 * mass / total) * sampled;
    int range = 0;
    while (range < RANGES && above < wanted) above += scratch_.masses[range++];
    return range / (RANGES / LOWEST);
  }

  // Adds up the weights from the floor on by range, and sorts the range that decides; returns 0 if
  // they do not reach the mass.
  int64_t by_range(float floor, int64_t mass, float& found) {
    scratch_.masses.assign(RANGES, 0);
    collect(floor);
    for (int64_t i = 0; i < count_; i += 16) {
      const __mmask16 lanes = first_lanes(count_ - i);
      const __m512 x = _mm512_maskz_loadu_ps(lanes, scratch_.collected.data() + i);
      add(lanes, x, weight_of(lanes, x));
    }
    int chosen = 0;
    int64_t left = mass;
    while (chosen < RANGES && scratch_.masses[chosen] < left) left -= scratch_.masses[chosen++];
    if (chosen == RANGES) return 0;
    // Numbers in the ranges before are larger, for all of them are multiplied and rounded alike.
    const int64_t count = count_;
    count_ = 0;
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 lanes = first_lanes(count - i);
      const __m512 x = _mm512_maskz_loadu_ps(lanes, scratch_.collected.data() + i);
      const __mmask16 decisive =
          _mm512_mask_cmpeq_epi32_mask(lanes, range_of(x), _mm512_set1_epi32(chosen));
      if (decisive) keep(decisive, x);
    }
    reaches(left, found);
    return mass;
  }

  // The first token at which the running sum of kept weights exceeds the number's share of all.
  int64_t pick(float floor) {
    auto& sums = scratch_.sums;
    sums.assign(blocks_, 0);
    const __m512 floors = _mm512_set1_ps(std::max(floor, LOWEST));
    const auto kept = [&](int64_t i) {
      const __mmask16 inside = first_lanes(n_ - i);
      const __m512 x = scaled(i, inside);
      return weigh(i, _mm512_mask_cmp_ps_mask(inside, x, floors, _CMP_GE_OQ), x);
    };
    int64_t total = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      if (!(scratch_.tops[b] >= std::max(floor, LOWEST))) continue;
      __m512i sum = _mm512_setzero_si512();
      for (int64_t i = b * BLOCK; i < std::min(n_, (b + 1) * BLOCK); i += 16) {
        const __m512 weight = kept(i);
        sum = _mm512_add_epi64(sum, _mm512_add_epi64(low_weights(weight), high_weights(weight)));
      }
      sums[b] = _mm512_reduce_add_epi64(sum);
      total += sums[b];
    }
    if (!total) return 0;
    int64_t left = share(draw_.u, total), b = 0;
    while (left >= sums[b]) left -= sums[b++];
    for (int64_t i = b * BLOCK; i < std::min(n_, (b + 1) * BLOCK); i += 16) {
      const __m512 weight = kept(i);
      alignas(64) int64_t weights[16];
      _mm512_store_si512(weights, low_weights(weight));
      _mm512_store_si512(weights + 8, high_weights(weight));
      for (int lane = 0; lane < 16; ++lane) {
        if (left < weights[lane]) return i + lane;
        left -= weights[lane];
      }
    }
    return n_ - 1;  // never
  }

  const Number* logits_;
  const int64_t n_;
  const Draw& draw_;
  Scratch& scratch_;
  const int64_t blocks_;
  float largest_;
  bool stored_ = false;
  int64_t count_ = 0;  // numbers that are collected
};

// A row's edits and mask, applied to a copy.
struct Changes {
  const int64_t* columns;
  const float* numbers;
  const int32_t* masks;

  template <typename Number>
  void copy(const Number* logits, int64_t n, const Draw& draw, std::vector<float>& row) const {
    row.resize(n);
    const int64_t words = (n + 31) / 32;
    const int32_t* mask = draw.mask < 0 ? nullptr : masks + draw.mask * words;
    const __m512 impossible = _mm512_set1_ps(-INFINITE);
    for (int64_t i = 0; i < n; i += 16) {
      const __mmask16 lanes = first_lanes(n - i);
      __m512 x = load_any(logits + i, lanes);
      if (mask) {
        const auto allowed = static_cast<uint32_t>(mask[i / 32]) >> (i % 32);
        x = _mm512_mask_mov_ps(impossible, static_cast<__mmask16>(allowed), x);
      }
      _mm512_mask_storeu_ps(row.data() + i, lanes, x);
    }
    for (int64_t e = draw.first_edit; e < draw.last_edit; ++e) {
      const int64_t i = columns[e];
      if (!mask || (static_cast<uint32_t>(mask[i / 32]) >> (i % 32) & 1)) row[i] = numbers[e];
    }
  }
};

template <typename Number>
int64_t choose(const Number* row, int64_t n, const Draw& draw, Scratch& scratch) {
  if (draw.temperature > 0.f) return Row<Number>(row, n, draw, scratch).token();
  float largest;
  int64_t token;
  weft_argmax(row, std::is_same_v<Number, float>, 1, n, &largest, &token);
  return token;
}

template <typename Number>
void draw_rows(const Number* logits, int64_t stride, int64_t n, const Draw* draws, int64_t count,
               const Changes& changes, int64_t* tokens) {
#pragma omp parallel if (count > 1)
  {
    Scratch scratch;
    std::vector<float> changed;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; ++i) {
      const Draw& draw = draws[i];
      const Number* row = logits + draw.row * stride;
      if (draw.first_edit == draw.last_edit && draw.mask < 0) {
        tokens[i] = choose(row, n, draw, scratch);
      } else {
        changes.copy(row, n, draw, changed);
        tokens[i] = choose(changed.data(), n, draw, scratch);
      }
    }
  }
}

}  // namespace

void weft_draw(const void* logits, int32_t is_float, int64_t stride, int64_t n, const Draw* draws,
               int64_t count, const int64_t* columns, const float* numbers, const int32_t* masks,
               int64_t* tokens) {
  const Changes changes{columns, numbers, masks};
  if (is_float)
    draw_rows(static_cast<const float*>(logits), stride, n, draws, count, changes, tokens);
  else
    draw_rows(static_cast<const bf16*>(logits), stride, n, draws, count, changes, tokens);
}
