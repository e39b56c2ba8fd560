"""Steps of two models compiled for TPU slices that are not here: time, memory, hidden traffic.

    python benchmarks/tpu_steps.py                                   # a table of all
    python benchmarks/tpu_steps.py --model llama --target v5e:2x4 --kernels overlapped --json

The step is the largest of an engine with 8 requests and 512 tokens; the models have two layers.
Its tokens are sharded between blocks, even if the planner finds that dearer (models/plan/switches);
with --replicated, each device has all of them.
Each is compiled in a process of its own, as libtpu describes one kind of TPU in each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
LLAMA_SMALL = LLAMA_8B | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}
MINIMAX_SMALL = LLAMA_SMALL | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "intermediate_size": 512,
    "rotary_dim": 64,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "llama": (LLAMA_8B, 1),
    "qwen3_moe": (QWEN3_MOE, 4),
    "small-llama": (LLAMA_SMALL, 1),
    "small-minimax": (MINIMAX_SMALL, 4),
}
"""A config, and the parts that experts are dealt out to."""

ROWS, TOKENS = 8, 512
"""A step's requests and tokens."""

TARGETS = ("v5e:2x4", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1")


def compile_step(
    model: str,
    topology: str,
    kernels: Literal["auto", "overlapped", "plain"] = "auto",
    *,
    sharded: bool = True,
) -> dict[str, Any]:
    """Compile a step; what the compiler says of it. Bytes are of one device.

    Args:
        model: of `MODELS`.
        topology: such as "v5e:2x4"; the model is split over all of its devices.
        kernels: --kernels.
        sharded: each device has a part of the tokens between blocks.
    """
    from weft.models.checkpoint.locate import read_spec
    from weft.models.jax.platform import described_devices

    devices = described_devices(topology)
    from weft.models.jax.buckets import Buckets
    from weft.models.jax.mesh import make_mesh
    from weft.models.jax.overlap import collectives, mosaic_kernels
    from weft.models.jax.program import Program
    from weft.models.plan.switches import Decision, Torus
    from weft.models.spec.layout import Layout

    config, ep = MODELS[model]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        spec = read_spec(Path(folder))
    tp = len(devices)
    sizes: dict[str, Any] = {"max_num_seqs": ROWS, "block_size": 16}
    layout, dtype = Layout(tp, ep), "bfloat16"
    mesh = make_mesh(devices, tp, ep)
    limits = {"max_num_batched_tokens": TOKENS, "max_model_len": 2048}
    bucket = Buckets(spec, layout, mesh, dtype, kernels=kernels, **limits, **sizes).all()[0]
    decision = Decision(sharded, "measured here")
    with mock.patch.object(Torus, "shards_tokens", return_value=decision):
        program = Program(
            *(spec, layout, mesh),
            dtype=dtype,
            num_blocks=1024,
            buckets=[bucket],
            kernels=kernels,
            **sizes,
        )
    began = time.perf_counter()
    compiled = program.compile_forward(bucket)
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    hlo = compiled.as_text()
    return {
        "model": model,
        "topology": topology,
        "devices": tp,
        "seconds": seconds,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "collectives": [asdict(one) for one in collectives(hlo)],
        "kernels": mosaic_kernels(hlo),
    }


def row(step: dict[str, Any]) -> str:
    """A line of the table."""
    found = step["collectives"]
    moved = sum(one["bytes"] for one in found)
    hidden = sum(one["bytes"] for one in found if one["products"])
    return (
        f"| {step['model']} | {step['topology']} | {step['devices']} | {step['seconds']:.0f} s "
        f"| {step['arguments'] / 2**20:.0f} MiB | {step['temporaries'] / 2**20:.1f} MiB "
        f"| {len(found)} | {moved / 2**20:.1f} MiB | {hidden / moved:.0%} |"
    )


def main() -> None:
    """Compile what is asked for, one after the other."""
    parser = argparse.ArgumentParser(description="Compile steps of two models for TPUs.")
    parser.add_argument("--model", choices=MODELS, help="only this")
    parser.add_argument("--target", help="only this slice")
    parser.add_argument("--kernels", default="auto", choices=("auto", "overlapped", "plain"))
    parser.add_argument("--replicated", action="store_true", help="all tokens on each device")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    arguments = parser.parse_args()
    models = [arguments.model] if arguments.model else ["llama", "qwen3_moe"]
    targets = [arguments.target] if arguments.target else TARGETS
    if not arguments.json:
        print("| model | slice | devices | compiled in | weights and cache | temporaries "
              "| collectives | traffic | beside products |")  # fmt: skip
        print("|---|---|---|---|---|---|---|---|---|")
    for model in models:
        for target in targets:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                asked = partial(compile_step, sharded=not arguments.replicated)
                step = pool.submit(asked, model, target, arguments.kernels).result()
            print(json.dumps(step) if arguments.json else row(step), flush=True)


if __name__ == "__main__":
    main()
