// What kernels/cpu/native.py calls: plain structs and pointers, so that one build serves every
// release of torch and Python. Matrices are row-major, bfloat16 unless said; nothing is kept but
// scratch memory of each calling thread.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace weft {

using bf16 = uint16_t;

enum Format : int32_t { PLAIN, INT8, COMPRESSED, INT4, INT4_ZEROS };

// A number of a compressed weight that its 12 bits cannot give.
struct Escape {
  int32_t k;
  uint16_t column;  // of its panel
  bf16 value;
};

struct Matrix {
  const void* weight;           // packed by weft_pack
  const float* scale;           // of each packed column of integers, or null
  const bf16* bias;             // of each packed column, or null
  const Escape* escapes;        // of a compressed weight, panel by panel
  const int64_t* escape_start;  // [panels + 1]
  int64_t n, k;                 // numbers that come out and go in
  Format format;
  int32_t top;                  // exponent of a compressed weight
  int32_t gated;
};

// RMSNorm, or layer norm, which subtracts the mean first.
struct Norm {
  const bf16* weight;  // [k], or null for no norm
  const bf16* bias;    // [k] or null
  float eps;
  int32_t centered;
};

struct Rows {
  const bf16* data;
  int64_t stride;        // numbers between rows
  const int32_t* index;  // which rows; null for all in order
  Norm norm;             // comes first
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Scratch memory that grows and stays.
template <typename T>
class Buffer {
 public:
  T* get(int64_t count) {
    if (count > size_) {
      const size_t bytes = static_cast<size_t>(ceil_div(count * sizeof(T), 64)) * 64;
      data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
      size_ = data_ ? count : 0;
      if (!data_) throw std::bad_alloc();
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

}  // namespace weft

#pragma GCC visibility push(default)
extern "C" {

// Of what is declared here: to be raised with every change, here and in native.py, which takes no
// library of another version.
constexpr int32_t WEFT_VERSION = 6;
int32_t weft_version();

// A weight [n, k], or gate and up of a gated layer [2 n, k], int8 or bfloat16 -> out
// [panels][ceil(k / 2)][pair of k of 32 columns], in the matrix's format: 32 rows of the weight to
// a panel, or 16 of the gate and their 16 of up. Codes of int4 come in bytes; before each group of
// 16 pairs, the caller puts the group's scales, float16 [32], and its zero points, int8 [32], if it
// has them. `rows` is where each row of the weight begins; of the matrix, `weight` and `escapes` are
// not read.
//
// Of a compressed one also the escapes, and where each panel's begin, [panels + 1]. With more than
// `most`, packing stops: the last start is then too large, and all other results are garbage.
void weft_pack(const void* const* rows, const weft::Matrix* matrix, void* out,
               weft::Escape* escapes, int64_t most, int64_t* escape_start);

// Rows of a weight of bfloat16, plain or compressed, that is not gated: out [count, k].
void weft_weight_rows(const weft::Matrix* matrix, const int64_t* index, int64_t count,
                      weft::bf16* out);

// out [rows, n] = residual + norm(x) @ weight.T * scale + bias, or with silu(gate) * up if gated.
void weft_linear(const weft::Matrix* matrix, const weft::Rows* x, int64_t rows,
                 const weft::bf16* residual, weft::bf16* out);

// logits [tokens, experts] -> the top_k most probable: ids, weights [tokens, top_k].
void weft_route(const weft::bf16* logits, int64_t tokens, int64_t experts, int64_t top_k,
                int normalize, int32_t* ids, float* weights);

// out [tokens, n] = residual + sum over c of weights[:, c] * down[ids[:, c]](gate_up[ids[:, c]](x)).
void weft_experts(const weft::Matrix* gate_up, const weft::Matrix* down, int64_t experts,
                  const weft::Rows* x, int64_t tokens, int64_t top_k, const int32_t* ids,
                  const float* weights, const weft::bf16* residual, weft::bf16* out);

// qkv [tokens, (heads + 2 kv_heads) * dim]: query heads are normalised and turned in place, keys
// and values go to their pages.
struct RopeStep {
  weft::bf16* qkv;
  const weft::bf16 *cos, *sin;        // [tokens, dim]; sin has the sign of rotate_half
  const weft::bf16 *q_norm, *k_norm;  // [dim] or null
  weft::bf16 *keys, *values;          // [blocks, kv_heads, block_size, dim]
  const int64_t *page, *slot;         // [tokens]
  int64_t tokens, heads, kv_heads, dim, block_size;
  float eps;
};
void weft_rope(const RopeStep* step);

struct AttentionStep {
  const weft::bf16* q;  // [tokens, heads, dim], rows q_stride apart
  int64_t q_stride;
  const weft::bf16 *keys, *values;  // [blocks, kv_heads, block_size, dim]
  const int32_t *query_start, *context_len, *block_table;
  int64_t requests, table_width, block_size;
  int64_t heads, kv_heads, dim;
  int64_t window;  // 0 for none
  float scale;
  weft::bf16* out;  // [tokens, heads, dim]
};
void weft_attention(const AttentionStep* step);

// A step's tokens: where each is, and the requests that they belong to.
struct Batch {
  const int64_t *page, *slot;                              // [tokens]
  const int32_t *query_start, *context_len, *block_table;  // as in AttentionStep
  int64_t tokens, requests, table_width, block_size;
};

struct AttentionLayer {
  const weft::Matrix *qkv, *o;
  weft::Norm norm;                    // comes first
  const weft::bf16 *q_norm, *k_norm;  // [dim] or null
  int64_t heads, kv_heads, dim;
  int64_t window;  // 0 for none
  float head_eps, scale;
};
// out [tokens, hidden] = x + o(attention(rope(qkv(norm(x))))); cos and sin as in RopeStep.
void weft_attention_layer(const AttentionLayer* layer, const Batch* batch, const weft::bf16* x,
                          const weft::bf16* cos, const weft::bf16* sin, weft::bf16* keys,
                          weft::bf16* values, weft::bf16* out);

struct MlpLayer {
  const weft::Matrix *gate_up, *down;
  weft::Norm norm;
  int32_t parallel;  // in weft_layers: it reads the attention's input
};
// out [tokens, hidden] = residual + down(gate_up(norm(x))). out may be x.
void weft_mlp(const MlpLayer* layer, const weft::bf16* x, const weft::bf16* residual,
              int64_t tokens, weft::bf16* out);

// Layers one after the other: x [tokens, hidden] -> out. keys and values are those of each layer.
void weft_layers(const AttentionLayer* attention, const MlpLayer* mlp, int64_t count,
                 const Batch* batch, const weft::bf16* x, const weft::bf16* cos,
                 const weft::bf16* sin, weft::bf16* const* keys, weft::bf16* const* values,
                 weft::bf16* out);

// x [rows, n], float32 or bfloat16 -> the largest of each row, or NaN if it has one, and where that
// is first.
void weft_argmax(const void* x, int32_t is_float, int64_t rows, int64_t n, float* largest,
                 int64_t* index);

// How a row's token is drawn; see models/torch/draw.py. Fractions are in units of 2^-48.
struct Draw {
  int64_t row;           // of the logits
  float temperature;     // at which one logit less halves a weight; 0: the largest logit
  float min_log_weight;  // log2 of the smallest weight that is kept
  int64_t top_k;         // n keeps all
  int64_t tail;          // the fraction that top-p cuts off
  int64_t u;             // the uniform number
  int64_t first_edit;    // edits of the row: from here
  int64_t last_edit;     // to before here
  int64_t mask;          // or -1
};
// logits [*, n], float32 or bfloat16, rows at this stride -> a token for each draw. An edit puts a
// number in a column. A mask [ceil(n / 32)] has a bit for each column that stays.
void weft_draw(const void* logits, int32_t is_float, int64_t stride, int64_t n, const Draw* draws,
               int64_t count, const int64_t* columns, const float* numbers, const int32_t* masks,
               int64_t* tokens);

// halvings [n], 0 at most -> floor(2^(40 + halvings)).
void weft_weigh(const float* halvings, int64_t n, int64_t* weights);
}
#pragma GCC visibility pop
