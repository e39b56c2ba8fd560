// The two halves of a decoder's layer, each one call, and whole layers: for one user, a call from
// Python for every kernel leaves the memory idle for a tenth of the time, and one for every half of
// a layer for a twentieth.
#include "weft.h"

using namespace weft;

void weft_attention_layer(const AttentionLayer* layer, const Batch* batch, const bf16* x,
                          const bf16* cos, const bf16* sin, bf16* keys, bf16* values, bf16* out) {
  const AttentionLayer& l = *layer;
  const Batch& b = *batch;
  thread_local Buffer<bf16> qkv_buffer, inner_buffer;
  bf16* qkv = qkv_buffer.get(b.tokens * l.qkv->n);
  bf16* inner = inner_buffer.get(b.tokens * l.o->k);
  const Rows rows{x, l.qkv->k, nullptr, l.norm};
  weft_linear(l.qkv, &rows, b.tokens, nullptr, qkv);
  const RopeStep rope{qkv,    cos,    sin,      l.q_norm, l.k_norm,   keys,  values,       b.page,
                      b.slot, b.tokens, l.heads, l.kv_heads, l.dim, b.block_size, l.head_eps};
  weft_rope(&rope);
  const AttentionStep attention{qkv,           l.qkv->n,      keys,       values,
                                b.query_start, b.context_len, b.block_table,
                                b.requests,    b.table_width, b.block_size,
                                l.heads,       l.kv_heads,    l.dim,      l.window,
                                l.scale,       inner};
  weft_attention(&attention);
  const Rows heads{inner, l.o->k, nullptr, {}};
  weft_linear(l.o, &heads, b.tokens, x, out);
}

void weft_mlp(const MlpLayer* layer, const bf16* x, const bf16* residual, int64_t tokens,
              bf16* out) {
  thread_local Buffer<bf16> buffer;
  bf16* inner = buffer.get(tokens * layer->down->k);
  const Rows rows{x, layer->gate_up->k, nullptr, layer->norm};
  weft_linear(layer->gate_up, &rows, tokens, nullptr, inner);
  const Rows gated{inner, layer->down->k, nullptr, {}};
  weft_linear(layer->down, &gated, tokens, residual, out);
}

void weft_layers(const AttentionLayer* attention, const MlpLayer* mlp, int64_t count,
                 const Batch* batch, const bf16* x, const bf16* cos, const bf16* sin,
                 bf16* const* keys, bf16* const* values, bf16* out) {
  thread_local Buffer<bf16> buffer;
  bf16* between = buffer.get(batch->tokens * attention->qkv->k);
  for (int64_t i = 0; i < count; ++i) {
    const bf16* before = i ? out : x;
    weft_attention_layer(attention + i, batch, before, cos, sin, keys[i], values[i], between);
    weft_mlp(mlp + i, mlp[i].parallel ? before : between, between, batch->tokens, out);
  }
}
