// Rotary positions, the KV cache, and attention over its pages, for ragged batches.
//
// Attention is FlashAttention-2 (Dao 2023) over pages (Kwon et al. 2023). The G = heads / kv_heads
// query heads that share a KV head are rows of one product, so that keys are not repeated.
//
// 1. Threads take tiles in turn, longest first: consecutive queries of a request for one KV head,
//    at most TILE_ROWS rows with their G heads. A lone query with many keys (decoding) is cut into
//    spans of SPAN keys that are tiles of their own (flash decoding), whose parts are merged last.
// 2. A tile goes over its keys KEYS at a time. Keys and values are gathered from their pages into
//    the two operands that the product wants; those past the context or before the window are
//    zeros, and never read: what another request left in a page, NaN included, is not seen.
// 3. Scores are float32, masked by position; the softmax is online; weights are rounded to
//    bfloat16 for the product with the values, which adds to the tile's float32 sums.
//
// A row's result depends on its own request and position alone. KEYS and SPAN cut the context at
// the same places whoever else is in the batch, and a prefill, which is not cut, merges its spans
// by the same additions as a decode.
#include <cmath>
#include <limits>
#include <vector>

#include "vector.h"
#include "weft.h"

namespace weft {
namespace {

constexpr int KEYS = 64;         // of one turn of a tile
constexpr int64_t SPAN = 1024;   // a multiple of KEYS
constexpr int TILE_ROWS = 72;    // their sums and one turn's operands stay in the first cache
constexpr int MAX_DIM = 256;
constexpr float NONE = -std::numeric_limits<float>::infinity();

struct Tile {
  int64_t request, kv_head;
  int64_t row, queries;     // of the batch
  int64_t position;         // of the first query
  int64_t first_key, end_key;
  int64_t part;             // where its sums go, or -1: straight to `out`
  int64_t cost() const { return queries * (end_key - first_key); }
};

// Rows of an unfinished softmax: weights are relative to 2 to the `largest`, sums are not divided.
struct Sums {
  float* values;  // [rows][dim]
  float* largest;
  float* total;
};

// Rows of the cache, of the keys of one turn.
struct Turn {
  const bf16 *key[KEYS], *value[KEYS];
};

alignas(64) constexpr bf16 ZEROS[MAX_DIM] = {};

// One thread's memory.
struct Work {
  alignas(64) bf16 q[TILE_ROWS * MAX_DIM];
  alignas(64) bf16 keys[KEYS * MAX_DIM];    // [KEYS / 32][dim / 2][32][2]
  alignas(64) bf16 values[KEYS * MAX_DIM];  // [dim / 32][KEYS / 2][32][2]
  alignas(64) bf16 weights[MAX_ROWS * KEYS];
  alignas(64) float scores[MAX_ROWS * KEYS];
  alignas(64) float span_values[TILE_ROWS * MAX_DIM], values_sum[TILE_ROWS * MAX_DIM];
  float span_largest[TILE_ROWS], span_total[TILE_ROWS];
  float largest[TILE_ROWS], total[TILE_ROWS];
};

inline int64_t panels_of(int64_t dim) { return ceil_div(dim, COLUMNS); }

inline int64_t first_turn(const Tile& tile) { return tile.first_key / KEYS * KEYS; }

// Where the keys and values of a turn are, first to first + KEYS - 1; zeros for those that the tile
// does not have.
void locate(const AttentionStep& s, const Tile& tile, int64_t first, Turn& turn) {
  const int32_t* pages = s.block_table + tile.request * s.table_width;
  const int64_t begin = std::max(first, tile.first_key), end = std::min(first + KEYS, tile.end_key);
  std::fill_n(turn.key, KEYS, ZEROS);
  std::fill_n(turn.value, KEYS, ZEROS);
  for (int64_t key = begin; key < end;) {
    const int64_t slot = key % s.block_size, stop = std::min(end, key - slot + s.block_size);
    const int64_t page = pages[key / s.block_size];
    int64_t at = ((page * s.kv_heads + tile.kv_head) * s.block_size + slot) * s.dim;
    for (; key < stop; ++key, at += s.dim) {
      turn.key[key - first] = s.keys + at;
      turn.value[key - first] = s.values + at;
    }
  }
}

// A turn's keys and values, as operands; meanwhile those of the next one are fetched.
void gather(const AttentionStep& s, const Turn& turn, const Turn& next, Work& work) {
  const int64_t pairs = s.dim / 2;
  for (int half = 0; half < KEYS / 16; ++half)
    for (int64_t d = 0; d < s.dim; d += 32) {
      const __mmask16 lanes = first_lanes(pairs - d / 2);
      __m512i numbers[16];
      for (int i = 0; i < 16; ++i) {
        _mm_prefetch(next.key[half * 16 + i] + d, _MM_HINT_T0);
        numbers[i] = _mm512_maskz_loadu_epi32(lanes, turn.key[half * 16 + i] + d);
      }
      transpose(numbers);
      bf16* out = work.keys + ((half / 2 * pairs + d / 2) * COLUMNS + half % 2 * 16) * 2;
      for (int p = 0; p < std::min<int64_t>(16, pairs - d / 2); ++p)
        _mm512_store_si512(out + p * COLUMNS * 2, numbers[p]);
    }
  // a0 b0 a1 b1 ...: unpack works within quarters of a vector, so the quarters are put in order.
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int64_t panel = 0; panel < panels_of(s.dim); ++panel)
    for (int i = 0; i < KEYS; i += 2) {
      const int64_t d = panel * COLUMNS;
      const __mmask16 lanes = first_lanes((s.dim - d) / 2);
      _mm_prefetch(next.value[i] + d, _MM_HINT_T0);
      _mm_prefetch(next.value[i + 1] + d, _MM_HINT_T0);
      const __m512i a = _mm512_maskz_loadu_epi32(lanes, turn.value[i] + d);
      const __m512i b = _mm512_maskz_loadu_epi32(lanes, turn.value[i + 1] + d);
      const __m512i even = _mm512_unpacklo_epi16(a, b), odd = _mm512_unpackhi_epi16(a, b);
      bf16* out = work.values + (panel * KEYS + i) * COLUMNS;
      _mm512_store_si512(out, _mm512_permutex2var_epi64(even, low, odd));
      _mm512_store_si512(out + 32, _mm512_permutex2var_epi64(even, high, odd));
    }
}

// into = both, as if their keys had gone by in one turn.
void merge(int64_t dim, float* into, float& largest, float& total, const float* values,
           float more_largest, float more_total) {
  if (more_total == 0) return;
  const float top = std::max(largest, more_largest);
  const float keep = largest == NONE ? 0.f : std::exp2(largest - top);
  const float take = std::exp2(more_largest - top);
  for (int64_t d = 0; d < dim; d += 16) {
    const __mmask16 lanes = first_lanes(dim - d);
    const __m512 more = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, values + d), _mm512_set1_ps(take));
    const __m512 old = _mm512_maskz_loadu_ps(lanes, into + d);
    _mm512_mask_storeu_ps(into + d, lanes, _mm512_fmadd_ps(old, _mm512_set1_ps(keep), more));
  }
  total = total * keep + more_total * take;
  largest = top;
}

// Softmax weights of a block's rows for this turn's keys; sums so far shrink to the new scale.
void softmax(const AttentionStep& s, const Tile& tile, int64_t first, int row, int rows,
             Work& work) {
  const int64_t group = s.heads / s.kv_heads, panels = panels_of(s.dim);
  const float to_exponent = s.scale * LOG2_E;  // weights are powers of two
  __m512i packed[KEYS / 32][16];
  for (int r = 0; r < rows; ++r) {
    const int64_t position = tile.position + (row + r) / group;
    const int64_t seen = std::min(position + 1, tile.end_key) - first;
    const int64_t hidden = std::max(s.window ? position + 1 - s.window : 0, tile.first_key) - first;
    const bool all = hidden <= 0 && seen >= KEYS;
    __m512 score[KEYS / 16], top = _mm512_set1_ps(NONE);
    for (int i = 0; i < KEYS / 16; ++i) {
      score[i] = _mm512_load_ps(work.scores + (i / 2 * MAX_ROWS + r) * COLUMNS + i % 2 * 16);
      if (!all) {
        const __mmask16 lanes = first_lanes(seen - i * 16) & ~first_lanes(hidden - i * 16);
        score[i] = _mm512_mask_mov_ps(_mm512_set1_ps(NONE), lanes, score[i]);
      }
      top = _mm512_max_ps(top, score[i]);
    }
    float& largest = work.span_largest[row + r];
    const float before = largest;
    largest = std::max(before, _mm512_reduce_max_ps(top) * to_exponent);
    // A row that sees nothing yet has no scale: its weights are zero whatever it is.
    const __m512 offset = _mm512_set1_ps(largest == NONE ? 0.f : largest);
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < KEYS / 16; ++i) {
      score[i] = exp2(_mm512_fmsub_ps(score[i], _mm512_set1_ps(to_exponent), offset));
      sum = _mm512_add_ps(sum, score[i]);
    }
    for (int i = 0; i < KEYS / 32; ++i)
      packed[i][r] = (__m512i)_mm512_cvtne2ps_pbh(score[2 * i + 1], score[2 * i]);
    const float keep = before == largest ? 1.f : before == NONE ? 0.f : std::exp2(before - largest);
    work.span_total[row + r] = work.span_total[row + r] * keep + _mm512_reduce_add_ps(sum);
    if (keep == 1.f) continue;
    for (int64_t panel = 0; panel < panels; ++panel)
      for (int h = 0; h < 2; ++h) {
        float* at = work.span_values + (row * panels + panel * rows + r) * COLUMNS + h * 16;
        _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(keep)));
      }
  }
  with_rows(rows, [&](auto count) {
    for (int i = 0; i < KEYS / 32; ++i)
      store_pairs<count()>(packed[i], 16, work.weights + i * 32 * rows);
  });
}

// Blocks of a tile have nearly equal heights; sums are [block][panel][row][COLUMNS].
template <typename Visit>
void for_blocks(int rows, Visit visit) {
  const int count = static_cast<int>(ceil_div(rows, MAX_ROWS));
  for (int b = 0, row = 0; b < count; ++b) {
    const int height = rows / count + (b < rows % count);
    visit(row, height);
    row += height;
  }
}

// `next` is what this thread will probably do after it.
void attend(const AttentionStep& s, const Tile& tile, const Tile& next, const Sums& parts,
            Work& work) {
  const int64_t group = s.heads / s.kv_heads, panels = panels_of(s.dim), pairs = s.dim / 2;
  const int rows = static_cast<int>(tile.queries * group);
  for_blocks(rows, [&](int row, int height) {
    for (int64_t d = 0; d < s.dim; d += 32) {
      __m512i numbers[16];
      const __mmask16 lanes = first_lanes(pairs - d / 2);
      for (int r = 0; r < height; ++r) {
        const int64_t query = tile.row + (row + r) / group;
        const int64_t head = tile.kv_head * group + (row + r) % group;
        numbers[r] = _mm512_maskz_loadu_epi32(lanes, s.q + query * s.q_stride + head * s.dim + d);
      }
      const int some = static_cast<int>(std::min<int64_t>(16, pairs - d / 2));
      with_rows(height, [&](auto count) {
        store_pairs<count()>(numbers, some, work.q + row * s.dim + d * height);
      });
    }
  });
  std::fill_n(work.largest, rows, NONE);
  std::fill_n(work.total, rows, 0.f);
  std::fill_n(work.values_sum, rows * s.dim, 0.f);
  Turn turns[2];
  int turn = 0;
  locate(s, tile, first_turn(tile), turns[turn]);
  for (int64_t span = tile.first_key / SPAN * SPAN; span < tile.end_key; span += SPAN) {
    std::fill_n(work.span_largest, rows, NONE);
    std::fill_n(work.span_total, rows, 0.f);
    std::fill_n(work.span_values, rows * panels * COLUMNS, 0.f);
    const int64_t begin = std::max(span, tile.first_key);
    const int64_t end = std::min(span + SPAN, tile.end_key);
    for (int64_t first = begin / KEYS * KEYS; first < end; first += KEYS) {
      if (first + KEYS < tile.end_key)
        locate(s, tile, first + KEYS, turns[!turn]);
      else
        locate(s, next, first_turn(next), turns[!turn]);
      gather(s, turns[turn], turns[!turn], work);
      turn = !turn;
      for_blocks(rows, [&](int row, int height) {
        for (int i = 0; i < KEYS / COLUMNS; ++i)
          multiply(height, work.q + row * s.dim, work.keys + i * pairs * COLUMNS * 2, pairs,
                   work.scores + i * MAX_ROWS * COLUMNS, false);
        softmax(s, tile, first, row, height, work);
        for (int64_t panel = 0; panel < panels; ++panel)
          multiply(height, work.weights, work.values + panel * KEYS * COLUMNS, KEYS / 2,
                   work.span_values + (row * panels + panel * height) * COLUMNS, true);
      });
    }
    for_blocks(rows, [&](int row, int height) {
      for (int r = 0; r < height; ++r) {
        alignas(64) float values[MAX_DIM];
        for (int64_t panel = 0; panel < panels; ++panel)
          std::memcpy(values + panel * COLUMNS,
                      work.span_values + (row * panels + panel * height + r) * COLUMNS,
                      COLUMNS * sizeof(float));
        merge(s.dim, work.values_sum + (row + r) * s.dim, work.largest[row + r],
              work.total[row + r], values, work.span_largest[row + r], work.span_total[row + r]);
      }
    });
  }
  for (int r = 0; r < rows; ++r) {
    const float* values = work.values_sum + r * s.dim;
    if (tile.part >= 0) {
      const int64_t at = tile.part * group + r;
      std::copy_n(values, s.dim, parts.values + at * s.dim);
      parts.largest[at] = work.largest[r];
      parts.total[at] = work.total[r];
      continue;
    }
    bf16* out = s.out + ((tile.row + r / group) * s.heads + tile.kv_head * group + r % group) * s.dim;
    for (int64_t d = 0; d < s.dim; d += 16) {
      const __mmask16 lanes = first_lanes(s.dim - d);
      const __m512 v = _mm512_maskz_loadu_ps(lanes, values + d);
      store_bf16(out + d, _mm512_div_ps(v, _mm512_set1_ps(work.total[r])), lanes);
    }
  }
}

// x [dim], normalised if there is a norm, and turned: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
void turn(const RopeStep& s, const bf16* x, const bf16* norm, int64_t token, bf16* out) {
  alignas(64) float row[MAX_DIM];
  __m512 squares = _mm512_setzero_ps();
  for (int64_t d = 0; d < s.dim; d += 16) {
    const __m512 v = load_bf16(x + d, first_lanes(s.dim - d));
    squares = _mm512_fmadd_ps(v, v, squares);
    _mm512_store_ps(row + d, v);
  }
  if (norm) {
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(s.dim);
    const __m512 factor = _mm512_set1_ps(1.f / std::sqrt(mean + s.eps));
    for (int64_t d = 0; d < s.dim; d += 16) {
      const __m512 weight = load_bf16(norm + d, first_lanes(s.dim - d));
      _mm512_store_ps(row + d, _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(row + d), factor), weight));
    }
  }
  const int64_t half = s.dim / 2;
  const bf16 *cos = s.cos + token * s.dim, *sin = s.sin + token * s.dim;
  for (int64_t d = 0; d < half; d += 16) {
    const __mmask16 lanes = first_lanes(half - d);
    const __m512 a = _mm512_maskz_loadu_ps(lanes, row + d);
    const __m512 b = _mm512_maskz_loadu_ps(lanes, row + half + d);
    const __m512 first = _mm512_mul_ps(b, load_bf16(sin + d, lanes));
    const __m512 second = _mm512_mul_ps(a, load_bf16(sin + half + d, lanes));
    store_bf16(out + d, _mm512_fmadd_ps(a, load_bf16(cos + d, lanes), first), lanes);
    store_bf16(out + half + d, _mm512_fmadd_ps(b, load_bf16(cos + half + d, lanes), second), lanes);
  }
}

}  // namespace
}  // namespace weft

using namespace weft;

void weft_rope(const RopeStep* step) {
  const RopeStep& s = *step;
  const int64_t width = (s.heads + 2 * s.kv_heads) * s.dim;
#pragma omp parallel for schedule(static) if (s.tokens * width > 1 << 14)
  for (int64_t t = 0; t < s.tokens; ++t) {
    bf16* q = s.qkv + t * width;
    const bf16 *k = q + s.heads * s.dim, *v = k + s.kv_heads * s.dim;
    for (int64_t h = 0; h < s.heads; ++h) turn(s, q + h * s.dim, s.q_norm, t, q + h * s.dim);
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      const int64_t at = ((s.page[t] * s.kv_heads + h) * s.block_size + s.slot[t]) * s.dim;
      turn(s, k + h * s.dim, s.k_norm, t, s.keys + at);
      std::memcpy(s.values + at, v + h * s.dim, s.dim * sizeof(bf16));
    }
  }
}

void weft_attention(const AttentionStep* step) {
  const AttentionStep& s = *step;
  const int64_t group = s.heads / s.kv_heads;
  std::vector<Tile> tiles;
  int64_t parts = 0;
  for (int64_t b = 0; b < s.requests; ++b) {
    const int64_t row = s.query_start[b], queries = s.query_start[b + 1] - row;
    const int64_t before = s.context_len[b] - queries;
    const int64_t step_queries = std::max<int64_t>(1, TILE_ROWS / group);
    for (int64_t first = 0; first < queries; first += step_queries) {
      const int64_t count = std::min(step_queries, queries - first);
      const int64_t position = before + first, end = position + count;
      const int64_t begin = s.window ? std::max<int64_t>(0, position + 1 - s.window) : 0;
      const int64_t first_span = begin / SPAN, spans = ceil_div(end, SPAN) - first_span;
      for (int64_t h = 0; h < s.kv_heads; ++h) {
        if (queries > 1 || spans == 1) {
          tiles.push_back({b, h, row + first, count, position, begin, end, -1});
          continue;
        }
        for (int64_t i = first_span; i < first_span + spans; ++i)
          tiles.push_back({b, h, row, 1, position, std::max(begin, i * SPAN),
                           std::min(end, (i + 1) * SPAN), parts++});
      }
    }
  }
  std::vector<Tile> order(tiles);
  std::stable_sort(order.begin(), order.end(),
                   [](const Tile& a, const Tile& b) { return a.cost() > b.cost(); });
  thread_local Buffer<float> buffer;
  float* memory = parts ? buffer.get(parts * group * (s.dim + 2)) : nullptr;
  const Sums sums{memory, memory + parts * group * s.dim, memory + parts * group * (s.dim + 1)};
#pragma omp parallel
  {
    thread_local Buffer<Work> work;
    Work& mine = *work.get(1);
#pragma omp for schedule(dynamic)
    for (size_t t = 0; t < order.size(); ++t)
      attend(s, order[t], order[std::min(t + omp_get_num_threads(), order.size() - 1)], sums, mine);
  }
  // The spans of a row are neighbours in `tiles`, in the order of its keys.
  for (size_t t = 0; t < tiles.size();) {
    const Tile& tile = tiles[t];
    size_t next = t + 1;
    if (tile.part >= 0)
      while (next < tiles.size() && tiles[next].part > tile.part && tiles[next].row == tile.row &&
             tiles[next].kv_head == tile.kv_head)
        ++next;
    for (int64_t g = 0; tile.part >= 0 && g < group; ++g) {
      alignas(64) float values[MAX_DIM] = {0};
      float largest = NONE, total = 0;
      for (size_t i = t; i < next; ++i) {
        const int64_t at = tiles[i].part * group + g;
        merge(s.dim, values, largest, total, sums.values + at * s.dim, sums.largest[at],
              sums.total[at]);
      }
      bf16* out = s.out + (tile.row * s.heads + tile.kv_head * group + g) * s.dim;
      for (int64_t d = 0; d < s.dim; d += 16) {
        const __mmask16 lanes = first_lanes(s.dim - d);
        const __m512 v = _mm512_maskz_loadu_ps(lanes, values + d);
        store_bf16(out + d, _mm512_div_ps(v, _mm512_set1_ps(total)), lanes);
      }
    }
    t = next;
  }
}
