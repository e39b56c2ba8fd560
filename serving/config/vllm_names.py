"""Names for settings in vLLM, SGLang and llama.cpp, so that their users can paste a command.

A name with the same meaning is an alias. The others get an answer that says what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALIASES: dict[str, tuple[str, ...]] = {
    "tp": ("--tensor-parallel-size", "-tp", "--tp-size"),
    "pp": ("--pipeline-parallel-size", "-pp", "--pp-size"),
    "dp": ("--data-parallel-size", "-dp", "--dp-size"),
    "redundant_experts": ("--num-redundant-experts", "--ep-num-redundant-experts"),
    "nodes": ("--nnodes",),
    "quantization": ("-q",),
    "max_model_len": ("--ctx-size", "-c", "--context-length"),
    "memory_fraction": ("--gpu-memory-utilization",),
    "kv_cache_memory": ("--kv-cache-memory-bytes",),
    "tool_parser": ("--tool-call-parser",),
    "otlp_endpoint": ("--otlp-traces-endpoint",),
    "log_stats": ("--enable-log-stats/--disable-log-stats",),
    "log_requests": (
        "--enable-log-requests/--no-enable-log-requests",
        "/--disable-log-requests",
    ),
    "prefix_caching": (
        "--enable-prefix-caching/--no-enable-prefix-caching",
        "/--disable-radix-cache",
    ),
    "cuda_graphs": ("--no-enforce-eager/--enforce-eager", "/--disable-cuda-graph"),
}
"""Setting -> other flags for it. A flag after a slash turns the setting off."""

VALUES: dict[str, dict[str, str]] = {
    "tool_parser": {"llama4_json": "llama3_json", "qwen3_xml": "qwen3_coder"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "reasoning_parser": dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "glm45", "holo2", "kimi_k2", "minimax_m2", "olmo3", "qwen3"),
        "think",
    ),
}
"""Setting -> vLLM's names for its values."""

NO_OPS = (
    "--enable-auto-tool-choice",
    "--enable-reasoning",
    "--enable-chunked-prefill",
    "--async-scheduling",
    "--enable-prompt-tokens-details",
)
"""Flags for what weft always does; they have no value."""

_JOIN = "use --nodes, and `weft join` on the other machines"
_NO_ADAPTERS = "weft does not load adapters; merge them into the model"
_NO_SPECULATION = "weft has no speculative decoding"
_OWN_CONFIG = "change the checkpoint's config.json"
_BOTH = "each model generates and embeds"
_GRAMMARS = "weft always enforces grammars with xgrammar"
ADVICE: dict[str, str] = {
    "--allowed-origins": "use --cors-origins, with commas between the origins",
    "--api-server-count": "one API process serves all engines",
    "--chat-template-content-format": "weft gives a message's content as text",
    "--code-revision": "weft never runs code from a checkpoint; leave it out",
    "--compilation-config": "weft compiles nothing that has options",
    "--convert": _BOTH,
    "--cpu-offload-gb": "weights stay on the devices; split them with --tp or --pp",
    "--data-parallel-address": _JOIN,
    "--data-parallel-rank": _JOIN,
    "--data-parallel-size-local": _JOIN,
    "-dcp": "use --cp; it multiplies the ranks of --tp",
    "--decode-context-parallel-size": "use --cp; it multiplies the ranks of --tp",
    "--disable-custom-all-reduce": "use --kernels plain",
    "--disable-uvicorn-access-log": "requests are logged only with --log-requests",
    "--distributed-executor-backend": "use --executor ray; processes are the default",
    "--download-dir": "set HF_HUB_CACHE to the folder",
    "--enable-eplb": "use --redundant-experts N; experts then move by themselves",
    "--eplb-config": "use --redundant-experts N",
    "--enable-expert-parallel": "use --ep N; N ranks share the experts",
    "--enable-lora": _NO_ADAPTERS,
    "--guided-decoding-backend": _GRAMMARS,
    "--hf-overrides": _OWN_CONFIG,
    "--hf-token": "set HF_TOKEN",
    "--limit-mm-per-prompt": "weft serves text only",
    "--load-format": "weft reads safetensors only",
    "--logits-processors": "use allowed_token_ids, bad_words, logit_bias or a grammar in requests",
    "--lora-modules": _NO_ADAPTERS,
    "--master-addr": _JOIN,
    "--max-logprobs": "the limit is 20",
    "--max-lora-rank": _NO_ADAPTERS,
    "--max-loras": _NO_ADAPTERS,
    "--mem-fraction-static": "use --memory-fraction; it is a fraction of the free memory",
    "--middleware": "put a proxy in front of the server",
    "--model-impl": "weft has one implementation for each family",
    "--model-path": "use --model",
    "--n-gpu-layers": "the whole model is on --device; see --pp",
    "-ngl": "the whole model is on --device; see --pp",
    "--no-async-scheduling": "steps are always scheduled ahead",
    "--no-enable-chunked-prefill": "long prompts are always computed in chunks",
    "--node-rank": _JOIN,
    "--num-gpu-blocks-override": "use --kv-cache-memory",
    "--num-speculative-tokens": _NO_SPECULATION,
    "--override-generation-config": "use --generation-config with a file",
    "--parallel": "use --max-num-seqs",
    "--root-path": "remove the prefix in the proxy",
    "--rope-scaling": _OWN_CONFIG,
    "--rope-theta": _OWN_CONFIG,
    "--runner": _BOTH,
    "--scheduling-policy": "requests always run by their priority",
    "--speculative-config": _NO_SPECULATION,
    "--speculative-model": _NO_SPECULATION,
    "--structured-outputs-config": _GRAMMARS,
    "--swap-space": "weft computes the KV cache of a preempted request again",
    "--task": _BOTH,
    "--tokenizer-mode": "weft uses tokenizer.json",
    "--tokenizer-revision": "use --tokenizer hf://OWNER/NAME@REVISION",
    "--trust-remote-code": "weft never runs code from a checkpoint; leave it out",
    "--uvicorn-log-level": "use --log-requests for a line with each request",
}
"""Flags without an equivalent of the same form -> what to do."""


def weft_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with weft's names instead of vLLM's.

    `tensor_parallel_size=2` becomes `tp=2`, and `enforce_eager=True` becomes `cuda_graphs=False`.
    An argument is left out if it is true and weft always behaves this way.
    """
    renamed: dict[str, Any] = {}
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if flag in NO_OPS and value is True:
            continue
        setting, negated = _SETTINGS.get(flag, (name, False))
        renamed[setting] = not value if negated and isinstance(value, bool) else value
    return renamed


_SETTINGS = {
    name: (setting, position == 1)
    for setting, aliases in ALIASES.items()
    for alias in aliases
    for position, name in enumerate(alias.split("/"))
}
"""Another flag -> weft's setting, and whether the flag turns it off."""
