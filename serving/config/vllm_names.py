"""vLLM's and llama.cpp's names for settings, so that their users can paste a command.

A name with the same meaning is an alias. The others get an answer that says what to do instead.
"""

from __future__ import annotations

ALIASES: dict[str, tuple[str, ...]] = {
    "tp": ("--tensor-parallel-size", "-tp"),
    "pp": ("--pipeline-parallel-size", "-pp"),
    "dp": ("--data-parallel-size", "-dp"),
    "nodes": ("--nnodes",),
    "max_model_len": ("--ctx-size", "--context-length"),
    "memory_fraction": ("--gpu-memory-utilization",),
    "kv_cache_memory": ("--kv-cache-memory-bytes",),
    "tool_parser": ("--tool-call-parser",),
    "otlp_endpoint": ("--otlp-traces-endpoint",),
    "log_requests": ("--enable-log-requests/--no-enable-log-requests",),
    "prefix_caching": ("--enable-prefix-caching/--no-enable-prefix-caching",),
    "cuda_graphs": ("--no-enforce-eager/--enforce-eager",),
}
"""Setting -> other flags for it. A pair with a slash turns a setting on and off."""

VALUES: dict[str, dict[str, str]] = {
    "tool_parser": {"llama4_json": "llama3_json", "qwen3_xml": "qwen3_coder"},
    "reasoning_parser": dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "glm45", "holo2", "kimi_k2", "minimax_m2", "olmo3", "qwen3"),
        "think",
    ),
}
"""Setting -> vLLM's names for its values."""

NO_OPS = (
    "--enable-auto-tool-choice",
    "--enable-chunked-prefill",
    "--async-scheduling",
    "--disable-log-stats",
)
"""Flags for what weft always does; they have no value."""

ADVICE: dict[str, str] = {
    "--allowed-origins": "use --cors-origins, with commas between the origins",
    "--chat-template-content-format": "weft gives a message's content as text",
    "--cpu-offload-gb": "weights stay on the devices; split them with --tp or --pp",
    "--data-parallel-rank": "use --nodes, and `weft join` on the other machines",
    "--decode-context-parallel-size": "use --cp; it multiplies the ranks of --tp",
    "--distributed-executor-backend": "use --executor ray; processes are the default",
    "--download-dir": "set HF_HUB_CACHE to the folder",
    "--enable-expert-parallel": "use --ep N; N ranks share the experts",
    "--enable-lora": "weft does not load adapters; merge them into the model",
    "--hf-overrides": "change the checkpoint's config.json",
    "--hf-token": "set HF_TOKEN",
    "--kv-cache-dtype": "the KV cache has the compute type; see --dtype",
    "--limit-mm-per-prompt": "weft serves text only",
    "--load-format": "weft reads safetensors only",
    "--master-addr": "use --nodes, and `weft join` on the other machines",
    "--max-logprobs": "the limit is 20",
    "--n-gpu-layers": "the whole model is on --device; see --pp",
    "--node-rank": "use --nodes, and `weft join` on the other machines",
    "--override-generation-config": "use --generation-config with a file",
    "--scheduling-policy": "requests always run by their priority",
    "--speculative-config": "weft has no speculative decoding",
    "--swap-space": "weft computes the KV cache of a preempted request again",
    "--task": "each model generates and embeds",
    "--tokenizer-mode": "weft uses tokenizer.json",
    "--trust-remote-code": "weft never runs code from a checkpoint; leave it out",
}
"""Flags without an equivalent of the same form -> what to do."""


def setting_for(name: str) -> str | None:
    """Return weft's name of a setting for vLLM's Python name, such as tensor_parallel_size."""
    flag = "--" + name.replace("_", "-")
    for setting, aliases in ALIASES.items():
        if flag in aliases:
            return setting
    return None
