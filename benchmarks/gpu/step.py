"""Where a decode step's time goes on a GPU, predicted without one.

    python benchmarks/gpu/step.py --output docs/benchmarks/gpu-step.md
    python benchmarks/gpu/step.py --model llama-3-8b --tp 8 --users 1,64 --device H100

The launches are the model's own, recorded with tensors that have no contents. The kernels' cost
model gives their seconds, so figures are estimates until a GPU has confirmed them.

    launches    of one layer, and of the step
    floor       bytes of the weights and of the cache over the memory's bandwidth
    device      products, attention, exchange and other kernels, and the gaps between them
    exposed     part of the device's time in which a rank only exchanges
    host        the step's Python code, if it is not a CUDA graph
    step        the longer of device and host
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["TRITON_INTERPRET"] = "0"  # read when kernels are imported

if TYPE_CHECKING:
    from weft.models.spec.layout import Layout
    from weft.models.spec.spec import ModelSpec

CONTEXT = 1024

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3-70b": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
    },
}

PUBLISHED = (
    *(("llama-3-8b", 1, 1, users) for users in (1, 16, 64, 256)),
    *(("llama-3-8b", 8, 1, users) for users in (1, 64)),
    *(("llama-3-70b", 8, 1, users) for users in (1, 64, 128)),
    *(("qwen3-30b-a3b", 1, 1, users) for users in (1, 64)),
    *(("qwen3-30b-a3b", 1, 8, users) for users in (1, 16)),
)
"""Model, --tp, --ep and users of each row; with --ep, users of each rank."""


@dataclass(frozen=True)
class Row:
    """A step's figures; times in milliseconds."""

    model: str
    flags: str
    users: int
    layer: int
    whole: int
    graph: bool
    floor: float
    parts: dict[str, float]
    exposed: float
    host: float

    @property
    def device(self) -> float:
        """The device's time."""
        return sum(self.parts.values())

    @property
    def step(self) -> float:
        """The step's time."""
        return max(self.device, self.host)


def main() -> int:
    """Print or write the table; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, help="only this one (all)")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--users", default="1,16,64", metavar="N,N", help="of --model (1,16,64)")
    parser.add_argument("--device", default="H100", help="a GPU of the cost model (H100)")
    parser.add_argument("--launches", action="store_true", help="list a layer's launches")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the page there")
    options = parser.parse_args()
    from weft.kernels.gpu.tuning.costs import GPUS

    gpu = next((gpu for gpu in GPUS if gpu.name == options.device.upper()), None)
    if gpu is None:
        known = ", ".join(gpu.name for gpu in GPUS)
        parser.error(f"--device is {options.device!r}; the cost model has {known}")
    chosen = PUBLISHED
    if options.model is not None:
        try:
            users = [int(each) for each in options.users.split(",")]
        except ValueError:
            users = []
        if not users or min(users) < 1:
            parser.error(f"--users is {options.users!r}; it must be numbers of at least 1")
        chosen = tuple((options.model, options.tp, options.ep, each) for each in users)
    rows = []
    for model, tp, ep, users_of in chosen:
        row, layer = predict(model, tp, ep, users_of, gpu)
        rows.append(row)
        if options.launches:
            names = Counter(launch.name for launch in layer)
            listed = ", ".join(f"{name} x {count}" for name, count in names.items())
            print(f"{model} {row.flags}, {users_of} users: {listed}", file=sys.stderr)
    print(table(rows))
    if options.output is not None:
        options.output.write_text(page(rows, gpu.name))
    return 0


def predict(model: str, tp: int, ep: int, users: int, gpu: Any) -> tuple[Row, Any]:
    """Record and price one step; return its row and a layer's launches."""
    from model.launch_costs import EAGER, IN_GRAPH, Batch, cost_of
    from model.recorded import MAX_TOKENS, record

    from weft.models.spec.build import build_spec
    from weft.models.spec.layout import Layout
    from weft.models.spec.spec import MoeSpec
    from weft.models.torch.graphs import recordings

    spec = build_spec(MODELS[model], Path("config.json"))
    layout = Layout(tp=tp, ep=ep)
    recorded = record(spec, layout, users, CONTEXT, gpu)
    blocks = [layer.feed_forward for layer in spec.layers]
    top_k = max(block.router.top_k if isinstance(block, MoeSpec) else 1 for block in blocks)
    batch = Batch(users, CONTEXT, top_k, spec.hidden_size)
    costs = [cost_of(launch, gpu, batch) for launch in recorded.whole]
    sizes = recordings(layout, users, MAX_TOKENS, overlapped=layout.world_size > 1)
    graph = max(sizes.decodes, default=0) >= users
    parts: dict[str, float] = dict.fromkeys(("products", "attention", "exchange", "other"), 0.0)
    for cost in costs:
        parts[cost.kind] += 1e3 * cost.seconds
    parts["gaps"] = 1e3 * IN_GRAPH * len(costs)
    host = 0.0 if graph else 1e3 * EAGER * len(costs)
    flags = " ".join(f"--{name} {size}" for name, size in (("tp", tp), ("ep", ep)) if size > 1)
    return Row(
        model,
        flags,
        users,
        len(recorded.layers),
        len(recorded.whole),
        graph,
        1e3 * floor(spec, layout, users) / gpu.memory,
        parts,
        1e3 * sum(cost.exposed for cost in costs),
        host,
    ), recorded.layers


def floor(spec: ModelSpec, layout: Layout, users: int) -> float:
    """Return the bytes that a rank must read: its weights and caches.

    Of experts, it reads as many as tokens are expected to choose.
    """
    from weft.models.spec.spec import MoeSpec

    local = layout.local(spec)
    weights = local.weight_bytes("bfloat16") - 2 * local.embedding.size
    for layer in local.layers:
        if isinstance(block := layer.feed_forward, MoeSpec):
            experts = block.gate.shape[0]
            each = 2 * (block.gate.size + block.up.size + block.down.size) / experts
            pairs = users * block.router.top_k
            chosen = experts * (1 - (1 - 1 / experts) ** pairs)
            weights -= int((experts - chosen) * each)
    return weights + users * CONTEXT * local.kv_bytes_per_token("bfloat16")


HEADINGS = (
    *("model", "flags", "users", "launches: layer", "step", "graph", "floor"),
    *(
        "products",
        "attention",
        "exchange",
        "other",
        "gaps",
        "exposed",
        "host",
        "step, ms",
        "/ floor",
    ),
)


def cells(row: Row) -> list[str]:
    """Return a row's cells."""
    times = [*row.parts.values(), row.exposed, row.host, row.step]
    return [
        *(row.model, row.flags, str(row.users), str(row.layer), str(row.whole)),
        *("yes" if row.graph else "no", f"{row.floor:.1f}"),
        *(f"{time:.2f}" for time in times),
        f"{row.step / row.floor:.1f}",
    ]


def table(rows: list[Row]) -> str:
    """Return the table in markdown."""
    lines = ["| " + " | ".join(HEADINGS) + " |"]
    lines.append("| --- | --- |" + " ---: |" * (len(HEADINGS) - 2))
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def page(rows: list[Row], device: str) -> str:
    """Return the page."""
    return f"""# A decode step on GPUs, predicted

`benchmarks/gpu/step.py` wrote this page, without a GPU. It records a real step's launches and
prices them with the kernels' cost model for the {device}. [On an H100](gpu.md), the 8B model on one
GPU took 0.97 to 1.14 times as long as predicted. The other figures are estimates.

    python benchmarks/gpu/step.py --output docs/benchmarks/gpu-step.md

Each user has {CONTEXT:,} tokens of context; with `--ep`, each rank has that number. Times are
milliseconds, without sampling and without the host's work between two steps.

{table(rows)}

- **floor**: the weights' and the cache's bytes, over the memory's bandwidth.
- **products**: torch's reach 85% of the memory's bandwidth or 75% of the arithmetic, and take
  1.5 us more (assumed).
- **gaps**: between two kernels in a CUDA graph, 1.2 us each (assumed).
- **exposed**: device time in which a rank only exchanges. A rank signals all peers at once behind
  its stores, and reads their signals at once: 1.2 us and 0.5 us (assumed).
- **host**: only for steps without a CUDA graph: 50 us for each launch in Python (assumed).
- **step**: the longer time: the device's or the host's.
"""


if __name__ == "__main__":
    sys.exit(main())
