"""The families and architectures that weft loads, by their names in config.json.

To add a family, write its function in dense.py or routed.py, list it in `FAMILIES`, put its fields
into config_table.py, and add its rows to the parity test.
"""

from __future__ import annotations

from weft.models.spec.decoder import BIASED_LAYER_NORM, LAYER_NORM
from weft.models.spec.families import dense, routed
from weft.models.spec.families.family import Family, Wrapper
from weft.models.spec.rope_fields import DYNAMIC, LONGROPE, MROPE, YARN, RopeRules

NEXT_LAYER = ("model.layers.{layers}.*",)
"""The layer after the last one; it predicts a second token."""

GLM = RopeRules(part=0.5, neighbours=True)
ERNIE = RopeRules(500_000.0, neighbours=True)
HUNYUAN = RopeRules(types=DYNAMIC)
QWEN2_VL = RopeRules(1_000_000.0, types=MROPE)
QWEN3_VL = RopeRules(500_000.0, types=MROPE)
"""Rotary embeddings of several families."""

FAMILIES = {
    "LlamaForCausalLM": Family("llama", dense.llama, 2048),
    "GraniteForCausalLM": Family("granite", dense.granite, 2048, finish=dense.scaled_ends),
    "GraniteMoeForCausalLM": Family(
        "granitemoe", routed.granite_moe, 2048, finish=dense.scaled_ends
    ),
    "GraniteMoeSharedForCausalLM": Family(
        "granitemoeshared", routed.granite_moe_shared, 2048, finish=dense.scaled_ends
    ),
    "CohereForCausalLM": Family(
        "cohere",
        dense.cohere,
        8192,
        1e-5,
        RopeRules(500_000.0, neighbours=True),
        tied=True,
        norms=LAYER_NORM,
        finish=dense.cohere_logits,
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2",
        dense.cohere2,
        8192,
        1e-5,
        RopeRules(neighbours=True),
        tied=True,
        norms=LAYER_NORM,
        finish=dense.cohere_logits,
    ),
    "StableLmForCausalLM": Family(
        "stablelm",
        dense.stablelm,
        4096,
        1e-5,
        RopeRules(part=0.25),
        kv_heads=32,
        norms=BIASED_LAYER_NORM,
    ),
    "Llama4ForCausalLM": Family(
        "llama4_text",
        routed.llama4,
        131_072,
        1e-5,
        RopeRules(500_000.0, neighbours=True),
        kv_heads=8,
        head_dim=128,
    ),
    "MistralForCausalLM": Family("mistral", dense.mistral, 131_072, kv_heads=8),
    "MixtralForCausalLM": Family(
        "mixtral", routed.mixtral, 131_072, 1e-5, RopeRules(1_000_000.0), kv_heads=8
    ),
    "Qwen2ForCausalLM": Family("qwen2", dense.qwen2, 32_768, kv_heads=32),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", routed.qwen2_moe, 32_768, kv_heads=16),
    "Qwen3ForCausalLM": Family("qwen3", dense.qwen3, 32_768, kv_heads=32, head_dim=128),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", routed.qwen3_moe, 32_768, kv_heads=4),
    "Phi3ForCausalLM": Family(
        "phi3",
        dense.phi3,
        4096,
        1e-5,
        RopeRules(part=1.0, types=LONGROPE, original_max_len=4096),
    ),
    "GlmForCausalLM": Family("glm", dense.glm, 131_072, 1.5625e-7, GLM, kv_heads=2, head_dim=128),
    "Glm4ForCausalLM": Family(
        "glm4", dense.glm4, 131_072, 1.5625e-7, GLM, kv_heads=2, head_dim=128
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        routed.glm4_moe,
        131_072,
        1e-5,
        RopeRules(part=0.5),
        skipped=NEXT_LAYER,
        kv_heads=8,
    ),
    "Dots1ForCausalLM": Family("dots1", routed.dots1, 2048, kv_heads=32),
    "BailingMoeV2ForCausalLM": Family(
        "bailing_moe",
        routed.bailing_moe,
        32_768,
        rope=RopeRules(600_000.0, part=1.0, has_dim=True),
        embedding="model.word_embeddings",
        other_types=("bailing_moe_v2",),
        skipped=NEXT_LAYER,
        kv_heads=4,
        head_dim=128,
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2",
        routed.minimax_m2,
        196_608,
        rope=RopeRules(5_000_000.0, part=1.0, has_dim=True),
        kv_heads=8,
        head_dim=128,
    ),
    "HYV3ForCausalLM": Family(
        "hy_v3",
        routed.hy_v3,
        131_072,
        1e-5,
        RopeRules(11_158_840.0),
        skipped=NEXT_LAYER,
        kv_heads=8,
        head_dim=128,
    ),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5", dense.ernie, 131_072, 1e-5, ERNIE, tied=True, kv_heads=2, head_dim=128
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        routed.ernie_moe,
        131_072,
        1e-5,
        ERNIE,
        tied=True,
        skipped=("model.mtp_*", "mtp_*"),
        kv_heads=4,
    ),
    "HunYuanDenseV1ForCausalLM": Family("hunyuan_v1_dense", dense.hunyuan, 2048, 1e-5, HUNYUAN),
    "HunYuanMoEV1ForCausalLM": Family("hunyuan_v1_moe", routed.hunyuan_moe, 2048, 1e-5, HUNYUAN),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        dense.ministral3,
        262_144,
        1e-5,
        RopeRules(types=YARN, scales_queries=True),
        kv_heads=8,
        head_dim=128,
    ),
    "SeedOssForCausalLM": Family("seed_oss", dense.seed_oss, 524_288, kv_heads=8, head_dim=128),
    "Olmo2ForCausalLM": Family("olmo2", dense.olmo2, 2048, 1e-5),
    "Olmo3ForCausalLM": Family(
        "olmo3", dense.olmo3, 2048, 1e-5, RopeRules(500_000.0, by_kind=True)
    ),
    "OlmoeForCausalLM": Family("olmoe", routed.olmoe, 4096, 1e-5),
    "FlexOlmoForCausalLM": Family("flex_olmo", routed.flex_olmo, 4096, rope=RopeRules(500_000.0)),
    "Exaone4ForCausalLM": Family("exaone4", dense.exaone4, 2048, 1e-5, kv_heads=32),
    "SmolLM3ForCausalLM": Family(
        "smollm3", dense.smollm3, 32_768, rope=RopeRules(2_000_000.0), tied=True, kv_heads=4
    ),
}

WRAPPERS = {
    "Qwen2VLForConditionalGeneration": Wrapper(
        "qwen2_vl",
        (Family("qwen2_vl_text", dense.qwen2, 32_768, 1e-5, QWEN2_VL, kv_heads=8),),
        text_ties=True,
    ),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(
        "qwen2_5_vl",
        (Family("qwen2_5_vl_text", dense.qwen2, 32_768, 1e-5, QWEN2_VL, kv_heads=8),),
        text_ties=True,
    ),
    "Qwen3VLForConditionalGeneration": Wrapper(
        "qwen3_vl",
        (
            Family(
                "qwen3_vl_text", dense.qwen3_vl, 128_000, rope=QWEN3_VL, kv_heads=32, head_dim=128
            ),
        ),
    ),
    "Qwen3VLMoeForConditionalGeneration": Wrapper(
        "qwen3_vl_moe",
        (Family("qwen3_vl_moe_text", routed.qwen3_vl_moe, 128_000, rope=QWEN3_VL, kv_heads=16),),
    ),
    "Llama4ForConditionalGeneration": Wrapper(
        "llama4", (FAMILIES["Llama4ForCausalLM"],), text_ties=True
    ),
    "Mistral3ForConditionalGeneration": Wrapper(
        "mistral3", (FAMILIES["MistralForCausalLM"], FAMILIES["Ministral3ForCausalLM"])
    ),
}
"""Models for several modalities."""

_TEXTS = [text for wrapper in WRAPPERS.values() for text in wrapper.texts]
ALL_FAMILIES = tuple({each.model_type: each for each in (*FAMILIES.values(), *_TEXTS)}.values())
"""The families, also those of text models alone."""

ARCHITECTURES = (*FAMILIES, *WRAPPERS)
"""The architectures that weft loads."""
