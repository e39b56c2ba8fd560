// Dense layers and mixtures of experts for few or many rows: out = f(norm(x) @ weight.T).
//
// 1. Weights are packed once, into panels of COLUMNS columns: [n / COLUMNS][k / 2][COLUMNS][2],
//    padded with zeros. A gated layer has 16 columns of the gate and the 16 of `up` that belong
//    to them in each panel. A step reads all weights, so bfloat16 is compressed without loss, to
//    three quarters (after Zhang et al. 2025, "70% Size, 100% Accuracy: DFloat11", section 2: the
//    exponents of a model's weights carry 2.6 bits; here codes of fixed width, which one shuffle
//    undoes).
// 2. A call cuts its rows into blocks of at most MAX_ROWS, of nearly equal height, and packs them
//    as [k / 2][rows][2]. Norms happen on the way: the normalised rows are never stored.
// 3. Threads take panels in turn, a few neighbours at a time. A panel is read from memory once, in
//    chunks that stay in the cache nearest to the core while all blocks use them; meanwhile each
//    block fetches its share of the next chunk. Reading so runs beside computing, at 16 rows as
//    at one. Numbers that are not plain are widened in
//    registers.
// 4. A finished tile gets its scale, bias, SiLU gate and residual while it is in the cache.
//
// A row's result does not depend on the other rows: each is one chain of additions over k.
//
// Threads are OpenMP's, in the pool that torch made; panels go to whoever is free, so that a core
// which the operating system takes away for a while costs one panel and not its share of all.
#include "vector.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "weft.h"

namespace weft {
namespace {

constexpr int64_t FEW_BLOCKS = 4;         // up to here a call is bound by reading weights
constexpr int64_t FEW_CHUNK_PAIRS = 64;   // 8 KiB of bfloat16 panel
constexpr int64_t MANY_CHUNK_PAIRS = 512;
constexpr int64_t BLOCKS_AT_ONCE = 8;     // their sums, and a chunk of a panel, stay in cache
constexpr int64_t WAVE_ROWS = 384;        // of a long prefill: packed, they stay in the last cache
constexpr int64_t TASKS_PER_THREAD = 8, MAX_PANELS_AT_ONCE = 8, MIN_TASKS_PER_THREAD = 24;

constexpr int64_t GROUP_NUMBERS = 2 * Int4Columns<true>::GROUP;
constexpr int64_t ROW_NUMBERS = INTEGER_ROWS ? 2 : 1;

bool needs_row_numbers(const Matrix& m) {
  return m.format == INT4_ZEROS || (INTEGER_ROWS && m.format == INT4);
}

// With more blocks, a chunk's columns are widened once and not by each block. AVX-512 widens beside
// the products. Without it, widening takes as long as they do.
template <typename Columns>
constexpr int64_t WIDENED_ABOVE = std::is_same_v<Columns, PlainColumns> ? BLOCKS_AT_ONCE
                                  : WEFT_PORTABLE                       ? 1
                                  : Columns::GROUP                      ? FEW_BLOCKS
                                                                        : BLOCKS_AT_ONCE;

// What a product is made of: rows first to first + rows - 1 go through `matrix`.
struct Group {
  const Matrix* matrix;
  int64_t first, rows;
};

struct Block {
  const Matrix* matrix;
  int64_t first;
  int rows;
};

struct Task {
  int64_t block, blocks;
  int64_t panel, panels;
};

int64_t panels_of(const Matrix& m) { return ceil_div(m.n, m.gated ? COLUMNS / 2 : COLUMNS); }

float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float mean_of(const bf16* x, int64_t k) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 16)
    sum = _mm512_add_ps(sum, load_bf16(x + i, first_lanes(k - i)));
  return _mm512_reduce_add_ps(sum) / static_cast<float>(k);
}

// 1 / the root of the mean square of x - mean, plus eps.
float inverse_rms(const bf16* x, int64_t k, float mean, float eps) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 16) {
    const __mmask16 left = first_lanes(k - i);
    const __m512 v = _mm512_maskz_sub_ps(left, load_bf16(x + i, left), _mm512_set1_ps(mean));
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  return 1.f / std::sqrt(_mm512_reduce_add_ps(sum) / static_cast<float>(k) + eps);
}

// A block of R rows, normalised, as [k / 2][R][2]. Unless null, also what int4 needs of each row's
// groups: [groups][ROW_NUMBERS][R], see `multiply_rows` and `multiply_integers`.
template <int R>
void pack_rows(const Rows& x, const Block& block, int64_t k, bf16* out, float* of_rows) {
  const bf16* row[R];
  const Norm& norm = x.norm;
  __m512 factor[R], shift[R];
  for (int r = 0; r < R; ++r) {
    const int64_t at = block.first + r;
    row[r] = x.data + (x.index ? x.index[at] : at) * x.stride;
    if (norm.weight) {
      const float mean = norm.centered ? mean_of(row[r], k) : 0.f;
      const float inverse = inverse_rms(row[r], k, mean, norm.eps);
      factor[r] = _mm512_set1_ps(inverse);
      shift[r] = _mm512_set1_ps(-mean * inverse);
    }
  }
  for (int64_t i = 0; i < k; i += 32) {
    __m512i numbers[R];
    const __mmask16 left = first_lanes(k - i), right = first_lanes(k - i - 16);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      numbers[r] = _mm512_maskz_loadu_epi16(left | __mmask32{right} << 16, row[r] + i);
    if (norm.weight) {
      const __m512 low_weight = load_bf16(norm.weight + i, left);
      const __m512 high_weight = load_bf16(norm.weight + i + 16, right);
      const __m512 none = _mm512_setzero_ps();
      const __m512 low_bias = norm.bias ? load_bf16(norm.bias + i, left) : none;
      const __m512 high_bias = norm.bias ? load_bf16(norm.bias + i + 16, right) : none;
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const __m512 low = widen(_mm512_castsi512_si256(numbers[r]));
        const __m512 high = widen(_mm512_extracti64x4_epi64(numbers[r], 1));
        numbers[r] = (__m512i)_mm512_cvtne2ps_pbh(
            _mm512_fmadd_ps(_mm512_fmadd_ps(high, factor[r], shift[r]), high_weight, high_bias),
            _mm512_fmadd_ps(_mm512_fmadd_ps(low, factor[r], shift[r]), low_weight, low_bias));
      }
    }
    if (of_rows) {
#if WEFT_INTEGER_ROWS
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) numbers[r] = round_row(numbers[r], of_rows[r], of_rows[R + r]);
#else
      const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
      for (int r = 0; r < R; ++r)
        of_rows[r] = _mm512_reduce_add_ps(
            _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)numbers[r], ones));
#endif
      of_rows += ROW_NUMBERS * R;
    }
    const int pairs = static_cast<int>(std::min<int64_t>(16, (k - i + 1) / 2));
    store_pairs<R>(numbers, pairs, out);
    out += 2 * R * pairs;
  }
}

// What follows the product, and the way to its place in `out`.
void finish(const Block& block, int64_t panel, const float* sums, const bf16* residual,
            bf16* out) {
  const Matrix& m = *block.matrix;
  for (int r = 0; r < block.rows; ++r) {
    __m512 v[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const int64_t column = panel * COLUMNS + h * 16;
      v[h] = _mm512_loadu_ps(sums + r * COLUMNS + h * 16);
      if (m.scale) v[h] = _mm512_mul_ps(v[h], _mm512_loadu_ps(m.scale + column));
      if (m.bias) v[h] = _mm512_add_ps(v[h], load_bf16(m.bias + column));
    }
    int halves = 2;
    if (m.gated) {
      v[0] = _mm512_mul_ps(silu(v[0]), v[1]);
      halves = 1;
    }
#pragma GCC unroll 2
    for (int h = 0; h < halves; ++h) {
      const int64_t column = panel * 16 * halves + h * 16;
      const int64_t at = (block.first + r) * m.n + column;
      const __mmask16 lanes = first_lanes(m.n - column);
      if (residual) v[h] = _mm512_add_ps(v[h], load_bf16(residual + at, lanes));
      store_bf16(out + at, v[h], lanes);
    }
  }
}

// The panel's escapes, as many as it will have; without a branch, which would wait for their number.
void fetch_escapes(const Matrix& m, int64_t panel) {
  const char* at = reinterpret_cast<const char*>(m.escapes + m.escape_start[panel]);
  _mm_prefetch(at, _MM_HINT_T0);
  _mm_prefetch(at + 64, _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char*>(m.escape_start + panel + 8), _MM_HINT_T0);
}

// What the panel's escapes add to the sums. Whole vectors, although one lane counts: a load of what
// a smaller store has written would wait for it.
void add_escapes(const Matrix& m, const Task& task, int64_t panel, const Block* blocks,
                 const bf16* packed, float* sums) {
  const int64_t pairs = (m.k + 1) / 2;
  for (int64_t i = m.escape_start[panel]; i < m.escape_start[panel + 1]; ++i) {
    const Escape& escape = m.escapes[i];
    const __m512bh columns = (__m512bh)_mm512_maskz_set1_epi32(
        static_cast<__mmask16>(1u << escape.column % 16), escape.value << escape.k % 2 * 16);
    for (int64_t b = 0; b < task.blocks; ++b) {
      const Block& block = blocks[task.block + b];
      const bf16* row = packed + (block.first * pairs + escape.k / 2 * block.rows) * 2;
      float* sum = sums + b * MAX_ROWS * COLUMNS + escape.column / 16 * 16;
      for (int r = 0; r < block.rows; ++r, row += 2, sum += COLUMNS)
        _mm512_store_ps(sum, _mm512_dpbf16_ps(_mm512_load_ps(sum), columns, broadcast_pair(row)));
    }
  }
}

template <typename Columns>
void run(const Task& task, const Columns& kind, const Block* blocks, const bf16* packed,
         const float* of_rows, float* sums, const bf16* residual, bf16* out) {
  constexpr int64_t PAIR = FETCHED<Columns>;
  const Matrix& m = *blocks[task.block].matrix;
  const int64_t pairs = (m.k + 1) / 2, groups = ceil_div(m.k, GROUP_NUMBERS);
  const int64_t chunk = task.blocks <= FEW_BLOCKS ? FEW_CHUNK_PAIRS : MANY_CHUNK_PAIRS;
  // Of a pair's bytes, each block fetches so many: the more evenly, the less the first one waits.
  const int64_t share = task.blocks * 16 >= PAIR ? 16 : task.blocks * 32 >= PAIR ? 32 : 64;
  const char* weight = static_cast<const char*>(m.weight);
  thread_local Buffer<char> buffer;
  for (int64_t panel = task.panel; panel < task.panel + task.panels; ++panel) {
    if (m.format == COMPRESSED) fetch_escapes(m, panel);
    for (int64_t pair = 0; pair < pairs; pair += chunk) {
      const int64_t count = std::min(chunk, pairs - pair);
      const char* columns = weight + panel * panel_bytes<Columns>(pairs) + offset_of<Columns>(pair);
      const char* next = columns + panel_bytes<Columns>(count);
      const char* widened = nullptr;
      if constexpr (!Columns::INTEGERS) {  // whose rows are no bfloat16
        if (task.blocks > WIDENED_ABOVE<Columns>) {
          char* to = buffer.get(panel_bytes<Widened<Columns>>(MANY_CHUNK_PAIRS));
          widen(kind, columns, count, to);
          widened = to;
        }
      }
      for (int64_t b = 0; b < task.blocks; ++b) {
        const Block& block = blocks[task.block + b];
        const bf16* rows = packed + (block.first * pairs + pair * block.rows) * 2;
        const float* of_block =
            of_rows ? of_rows + (block.first * groups + pair * 2 / GROUP_NUMBERS * block.rows) * ROW_NUMBERS
                    : nullptr;
        float* tile = sums + b * MAX_ROWS * COLUMNS;
        const auto with = [&](auto ahead, const auto& of, const char* at, const char* fetched) {
          multiply<ahead()>(block.rows, rows, of, at, count, tile, pair > 0, fetched,
                            of_block);
        };
        const auto fetching = [&](const auto& of, const char* at) {
          if (b * share >= PAIR)
            with(std::integral_constant<int64_t, 0>{}, of, at, nullptr);
          else if (share == 64)
            with(std::integral_constant<int64_t, 64>{}, of, at, next + b * count * 64);
          else if (share == 32)
            with(std::integral_constant<int64_t, 32>{}, of, at, next + b * count * 32);
          else
            with(std::integral_constant<int64_t, 16>{}, of, at, next + b * count * 16);
        };
        if (widened)
          fetching(Widened<Columns>{}, widened);
        else if (task.blocks == 1)
          with(std::integral_constant<int64_t, PAIR>{}, kind, columns, next);
        else
          fetching(kind, columns);
      }
    }
    if (m.format == COMPRESSED) add_escapes(m, task, panel, blocks, packed, sums);
    for (int64_t b = 0; b < task.blocks; ++b)
      finish(blocks[task.block + b], panel, sums + b * MAX_ROWS * COLUMNS, residual, out);
  }
}

// Calls f with how the matrix's columns are stored.
template <typename F>
void with_columns(const Matrix& m, F f) {
  switch (m.format) {
    case PLAIN: return f(PlainColumns{});
    case INT8: return f(Int8Columns{});
    case COMPRESSED: return f(CompressedColumns{m.top});
    case INT4: return f(Int4Columns<false>{});
    case INT4_ZEROS: return f(Int4Columns<true>{});
  }
}

// All groups of a call; matrices of the same shape, rows in the order of the groups.
void product(const std::vector<Group>& groups, const Rows& x, const bf16* residual, bf16* out) {
  const Matrix& any = *groups[0].matrix;
  const int64_t pairs = (any.k + 1) / 2, panels = panels_of(any);
  const int threads = omp_get_max_threads();
  int64_t total = 0;
  for (const Group& group : groups) total += ceil_div(group.rows, MAX_ROWS * BLOCKS_AT_ONCE);
  const int64_t panels_at_once = std::clamp<int64_t>(
      panels * total / (threads * TASKS_PER_THREAD), 1, MAX_PANELS_AT_ONCE);

  // A matrix with few panels has its rows shared out too, so that no thread is left waiting.
  const int64_t blocks_at_once =
      panels * total < threads * MIN_TASKS_PER_THREAD ? BLOCKS_AT_ONCE / 2 : BLOCKS_AT_ONCE;
  std::vector<Block> blocks;
  std::vector<Task> tasks;
  int64_t end = 0;
  bool any_needs = false;
  for (const Group& group : groups) {
    any_needs |= needs_row_numbers(*group.matrix);
    const int64_t first_block = static_cast<int64_t>(blocks.size());
    const int64_t count = ceil_div(group.rows, MAX_ROWS);
    for (int64_t b = 0, first = group.first; b < count; ++b) {
      const int rows = static_cast<int>(group.rows / count + (b < group.rows % count));
      blocks.push_back({group.matrix, first, rows});
      first += rows;
    }
    end = std::max(end, group.first + group.rows);
    for (int64_t panel = 0; panel < panels; panel += panels_at_once)
      for (int64_t b = 0; b < count; b += blocks_at_once)
        tasks.push_back({first_block + b, std::min(blocks_at_once, count - b), panel,
                         std::min(panels_at_once, panels - panel)});
  }
  thread_local Buffer<bf16> buffer;
  bf16* packed = buffer.get(end * pairs * 2);
  const int64_t row_groups = ceil_div(any.k, GROUP_NUMBERS);
  thread_local Buffer<float> number_buffer;
  float* of_rows = any_needs ? number_buffer.get(end * row_groups * ROW_NUMBERS) : nullptr;
#pragma omp parallel
  {
    alignas(64) float sums[BLOCKS_AT_ONCE * MAX_ROWS * COLUMNS];
#pragma omp for schedule(static)
    for (size_t b = 0; b < blocks.size(); ++b)
      with_rows(blocks[b].rows, [&](auto rows) {
        pack_rows<rows()>(x, blocks[b], any.k, packed + blocks[b].first * pairs * 2,
                          needs_row_numbers(*blocks[b].matrix)
                              ? of_rows + blocks[b].first * row_groups * ROW_NUMBERS
                              : nullptr);
      });
#pragma omp for schedule(dynamic) nowait
    for (size_t t = 0; t < tasks.size(); ++t) {
      const Matrix& m = *blocks[tasks[t].block].matrix;
      with_columns(m, [&](const auto& kind) {
        run(tasks[t], kind, blocks.data(), packed, of_rows, sums, residual, out);
      });
    }
  }
}

inline __m512i load_numbers(const bf16* p, __mmask32 lanes) {
  return _mm512_maskz_loadu_epi16(lanes, p);
}

inline __m512i load_numbers(const int8_t* p, __mmask32 lanes) {
  return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(lanes, p));
}

// Which row of the weight is a panel's column; -1 if none.
int64_t row_of(const Matrix& m, int64_t panel, int64_t column) {
  const int64_t n = m.gated ? panel * 16 + column % 16 : panel * COLUMNS + column;
  return n >= m.n ? -1 : m.gated && column >= 16 ? m.n + n : n;
}

// Calls visit(pair, left, right) for each pair of k of a panel: 16-bit numbers of its first 16
// columns, and of its last.
template <typename Weight, typename Visit>
void for_pairs(const void* const* rows, const Matrix& m, int64_t panel, Visit visit) {
  const Weight* row[COLUMNS];
  for (int c = 0; c < COLUMNS; ++c) {
    const int64_t at = row_of(m, panel, c);
    row[c] = at < 0 ? nullptr : static_cast<const Weight*>(rows[at]);
  }
  for (int64_t i = 0; i < m.k; i += 32) {
    const __mmask32 lanes = first_lanes(m.k - i) | __mmask32{first_lanes(m.k - i - 16)} << 16;
    __m512i numbers[2][16];
    for (int half = 0; half < 2; ++half) {
      for (int c = 0; c < 16; ++c) {
        const Weight* at = row[half * 16 + c];
        numbers[half][c] = at ? load_numbers(at + i, lanes) : _mm512_setzero_si512();
      }
      transpose(numbers[half]);
    }
    for (int64_t p = 0; p < 16 && i + 2 * p < m.k; ++p)
      visit(i / 2 + p, numbers[0][p], numbers[1][p]);
  }
}

template <typename Columns>
void pack_int4(const void* const* rows, const Matrix& m, int64_t panel, char* out) {
  for_pairs<int8_t>(rows, m, panel, [&](int64_t pair, __m512i left, __m512i right) {
    const int64_t group = pair / Columns::GROUP * Columns::GROUP;
    join_codes(_mm512_packus_epi16(left, right), out + offset_of<Columns>(group) + Columns::SCALES +
                                                     (pair - group) * Columns::PAIR);
  });
}

void pack_panel(const void* const* rows, const Matrix& m, int64_t panel, char* out,
                std::vector<Escape>& escapes) {
  if (m.format == PLAIN) {
    for_pairs<bf16>(rows, m, panel, [&](int64_t pair, __m512i left, __m512i right) {
      _mm512_storeu_si512(out + pair * PlainColumns::PAIR, left);
      _mm512_storeu_si512(out + pair * PlainColumns::PAIR + 64, right);
    });
  } else if (m.format == INT8) {
    for_pairs<int8_t>(rows, m, panel, [&](int64_t pair, __m512i left, __m512i right) {
      __m256i* at = reinterpret_cast<__m256i*>(out + pair * Int8Columns::PAIR);
      _mm256_storeu_si256(at, _mm512_cvtepi16_epi8(left));
      _mm256_storeu_si256(at + 1, _mm512_cvtepi16_epi8(right));
    });
  } else if (m.format == INT4) {
    pack_int4<Int4Columns<false>>(rows, m, panel, out);
  } else if (m.format == INT4_ZEROS) {
    pack_int4<Int4Columns<true>>(rows, m, panel, out);
  } else {
    const CompressedColumns columns(m.top);
    for_pairs<bf16>(rows, m, panel, [&](int64_t pair, __m512i left, __m512i right) {
      uint64_t found = columns.store(left, right, out + pair * CompressedColumns::PAIR);
      if (!found) return;
      alignas(64) bf16 values[64];
      _mm512_store_si512(values, left);
      _mm512_store_si512(values + 32, right);
      for (; found; found &= found - 1) {
        const int place = __builtin_ctzll(found), column = CompressedColumns::column_of(place);
        const int which = CompressedColumns::which_of(place);
        escapes.push_back({static_cast<int32_t>(2 * pair + which), static_cast<uint16_t>(column),
                           values[2 * column + which]});
      }
    });
  }
}

}  // namespace
}  // namespace weft

using namespace weft;

int32_t weft_version() { return WEFT_VERSION; }

void weft_pack(const void* const* rows, const Matrix* matrix, void* out, Escape* escapes,
               int64_t most, int64_t* escape_start) {
  const Matrix& m = *matrix;
  const int64_t panels = panels_of(m);
  int64_t bytes = 0;
  with_columns(m, [&](const auto& kind) {
    bytes = panel_bytes<std::decay_t<decltype(kind)>>((m.k + 1) / 2);
  });
  std::vector<std::vector<Escape>> found(panels);
  std::atomic<int64_t> count{0};
#pragma omp parallel for schedule(dynamic)
  for (int64_t panel = 0; panel < panels; ++panel) {
    if (count > most) continue;
    pack_panel(rows, m, panel, static_cast<char*>(out) + panel * bytes, found[panel]);
    count += static_cast<int64_t>(found[panel].size());
  }
  if (m.format != COMPRESSED) return;
  escape_start[0] = 0;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const auto size = static_cast<int64_t>(found[panel].size());
    escape_start[panel + 1] = escape_start[panel] + size;
    if (count <= most)
      std::copy(found[panel].begin(), found[panel].end(), escapes + escape_start[panel]);
  }
}

void weft_weight_rows(const Matrix* matrix, const int64_t* index, int64_t count, bf16* out) {
  const Matrix& m = *matrix;
  const int64_t pairs = (m.k + 1) / 2;
#pragma omp parallel for if (count > 16)
  for (int64_t r = 0; r < count; ++r) {
    const int64_t panel = index[r] / COLUMNS;
    const int column = static_cast<int>(index[r] % COLUMNS);
    bf16* row = out + r * m.k;
    if (m.format == PLAIN) {
      const bf16* at = static_cast<const bf16*>(m.weight) + (panel * pairs * COLUMNS + column) * 2;
      for (int64_t k = 0; k < m.k; ++k) row[k] = at[k / 2 * COLUMNS * 2 + k % 2];
      continue;
    }
    const char* at = static_cast<const char*>(m.weight) + panel * pairs * CompressedColumns::PAIR;
    for (int64_t k = 0; k < m.k; ++k)
      row[k] = CompressedColumns::number(at + k / 2 * CompressedColumns::PAIR, column,
                                         static_cast<int>(k % 2), m.top);
    for (int64_t i = m.escape_start[panel]; i < m.escape_start[panel + 1]; ++i)
      if (m.escapes[i].column == column) row[m.escapes[i].k] = m.escapes[i].value;
  }
}

void weft_linear(const Matrix* matrix, const Rows* x, int64_t rows, const bf16* residual,
                 bf16* out) {
  for (int64_t first = 0; first < rows; first += WAVE_ROWS) {
    Rows wave = *x;
    if (wave.index != nullptr) {
      wave.index += first;
    } else {
      wave.data += first * x->stride;
    }
    const int64_t done = first * matrix->n;
    product({{matrix, 0, std::min(WAVE_ROWS, rows - first)}}, wave,
            residual ? residual + done : nullptr, out + done);
  }
}

void weft_route(const bf16* logits, int64_t tokens, int64_t experts, int64_t top_k, int normalize,
                int32_t* ids, float* weights) {
#pragma omp parallel for if (tokens > 64)
  for (int64_t t = 0; t < tokens; ++t) {
    const bf16* row = logits + t * experts;
    const auto number = [&](int64_t e) { return to_float(row[e]); };
    float largest = -std::numeric_limits<float>::infinity(), sum = 0, chosen_sum = 0;
    for (int64_t e = 0; e < experts; ++e) largest = std::max(largest, number(e));
    for (int64_t e = 0; e < experts; ++e) sum += std::exp(number(e) - largest);
    int32_t* id = ids + t * top_k;
    for (int64_t c = 0; c < top_k; ++c) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts; ++e)
        if (std::find(id, id + c, e) == id + c && (best < 0 || number(e) > number(best))) best = e;
      id[c] = static_cast<int32_t>(best);
      weights[t * top_k + c] = std::exp(number(best) - largest) / sum;
      chosen_sum += weights[t * top_k + c];
    }
    if (normalize)
      for (int64_t c = 0; c < top_k; ++c) weights[t * top_k + c] /= chosen_sum;
  }
}

void weft_experts(const Matrix* gate_up, const Matrix* down, int64_t experts, const Rows* x,
                  int64_t tokens, int64_t top_k, const int32_t* ids, const float* weights,
                  const bf16* residual, bf16* out) {
  if (tokens == 0) return;
  const int64_t pairs = tokens * top_k, width = down[0].n;
  const auto is_here = [&](int32_t expert) { return expert >= 0 && expert < experts; };
  // Counting sort: the pairs of an expert are consecutive, in the order of their tokens.
  std::vector<int64_t> start(experts + 1, 0);
  for (int64_t i = 0; i < pairs; ++i)
    if (is_here(ids[i])) ++start[ids[i] + 1];
  for (int64_t e = 0; e < experts; ++e) start[e + 1] += start[e];
  const int64_t count = start[experts];
  std::vector<int32_t> token(count);
  std::vector<int64_t> place(pairs, -1), filled(start.begin(), start.end() - 1);
  for (int64_t i = 0; i < pairs; ++i)
    if (is_here(ids[i])) {
      place[i] = filled[ids[i]]++;
      token[place[i]] = static_cast<int32_t>(i / top_k);
    }
  std::vector<Group> up, back;
  for (int64_t e = 0; e < experts; ++e)
    if (const int64_t rows = start[e + 1] - start[e]) {
      up.push_back({gate_up + e, start[e], rows});
      back.push_back({down + e, start[e], rows});
    }
  thread_local Buffer<bf16> inner_buffer, result_buffer;
  bf16* inner = inner_buffer.get(count * down[0].k);
  bf16* result = result_buffer.get(count * width);
  Rows gathered = *x;
  gathered.index = token.data();
  if (count) {
    product(up, gathered, nullptr, inner);
    product(back, {inner, down[0].k, nullptr, {}}, nullptr, result);
  }
#pragma omp parallel for if (tokens > 16)
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < width; i += 16) {
      const __mmask16 lanes = first_lanes(width - i);
      __m512 sum = residual ? load_bf16(residual + t * width + i, lanes) : _mm512_setzero_ps();
      for (int64_t c = 0; c < top_k; ++c)
        if (const int64_t at = place[t * top_k + c]; at >= 0)
          sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[t * top_k + c]),
                                load_bf16(result + at * width + i, lanes), sum);
      store_bf16(out + t * width + i, sum, lanes);
    }
}
