"""Prints which of a list of published models weft loads, and their share by weight.

python tools/model_coverage.py FILE          # a table of tab-separated values

The first line that is no comment names the columns: `model` (as on the hub), `needs` and `weight`.
Needs are codes. Those in `FORMATS` name the format of the published weights; the others describe
the architecture, which `PUBLISHED` names. A model counts if weft has its architecture and reads its
format.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from weft.models.spec.families.registry import ARCHITECTURES
from weft.models.spec.quantization import METHODS

PUBLISHED = (
    ("Qwen/Qwen2.5-VL-*", "Qwen2_5_VLForConditionalGeneration"),
    ("Qwen/Qwen2.5-*", "Qwen2ForCausalLM"),
    ("Qwen/Qwen3-VL-*-A*", "Qwen3VLMoeForConditionalGeneration"),
    ("Qwen/Qwen3-Next-*", "Qwen3NextForCausalLM"),
    ("Qwen/Qwen3-Coder-Next*", "Qwen3NextForCausalLM"),
    ("Qwen/Qwen3-Omni-*", "Qwen3OmniMoeForConditionalGeneration"),
    ("Qwen/Qwen3-*-A*", "Qwen3MoeForCausalLM"),
    ("Qwen/Qwen3-*", "Qwen3ForCausalLM"),
    ("Qwen/Qwen3Guard-*", "Qwen3ForCausalLM"),
    ("meta-llama/Llama-3*-Vision*", "MllamaForConditionalGeneration"),
    ("meta-llama/Llama-3*", "LlamaForCausalLM"),
    ("meta-llama/Llama-4*", "Llama4ForConditionalGeneration"),
    ("MiniMaxAI/MiniMax-M2*", "MiniMaxM2ForCausalLM"),
    ("zai-org/GLM-4.[567]*V*", "Glm4vMoeForConditionalGeneration"),
    ("zai-org/GLM-4.7-Flash*", "Glm4MoeLiteForCausalLM"),
    ("zai-org/GLM-4.[567]*", "Glm4MoeForCausalLM"),
    ("zai-org/glm-4-9b-hf", "GlmForCausalLM"),
    ("microsoft/Phi-4-multimodal*", "Phi4MultimodalForCausalLM"),
    ("microsoft/[Pp]hi-4*", "Phi3ForCausalLM"),
    ("tencent/Hy3*", "HYV3ForCausalLM"),
    ("tencent/Hunyuan-A13B-*", "HunYuanMoEV1ForCausalLM"),
    ("ByteDance-Seed/Seed-OSS-*", "SeedOssForCausalLM"),
    ("mistralai/Mistral-Small-3.[12]-*", "Mistral3ForConditionalGeneration"),
    ("baidu/ERNIE-4.5-VL-*", "Ernie4_5_VLMoeForConditionalGeneration"),
    ("baidu/ERNIE-4.5-*-A*", "Ernie4_5_MoeForCausalLM"),
    ("ibm-granite/granite-3.*-[28]b-*", "GraniteForCausalLM"),
    ("ibm-granite/granite-3.*-a[48]00m-*", "GraniteMoeForCausalLM"),
    ("CohereLabs/c4ai-command-r7b-*", "Cohere2ForCausalLM"),
    ("CohereLabs/c4ai-command-a-*", "Cohere2ForCausalLM"),
    ("CohereLabs/c4ai-command-r*", "CohereForCausalLM"),
    ("stabilityai/stablelm-*", "StableLmForCausalLM"),
    ("rednote-hilab/dots.llm1.*", "Dots1ForCausalLM"),
    ("allenai/OLMoE-*", "OlmoeForCausalLM"),
    ("allenai/FlexOlmo-*", "FlexOlmoForCausalLM"),
    ("inclusionAI/Ring-1T*", "BailingMoeV2ForCausalLM"),
    ("inclusionAI/Ring-2.[56]-*", "BailingMoeV2_5ForCausalLM"),
    ("inclusionAI/Ling-2.[56]-*", "BailingMoeV2_5ForCausalLM"),
)
"""Models by name, and `architectures` in their config.json; the first match counts."""

FORMATS = {"F8B": "fp8", "I4": "compressed-tensors", "MX4": "mxfp4", "FP4": "nvfp4"}
"""Codes for formats of weights, and the method that config.json names."""

READS = frozenset(METHODS)
"""Methods of quantisation that weft reads."""

IN_SCOPE = frozenset({"-", "MAP", "SIG", "SH", "PR", "YN", "F8B", "FQ"})
"""The codes of models without other mixers, caches or norms."""


class Row(NamedTuple):
    """A published model: its needs, its weight, and why weft does not load it, or ""."""

    model: str
    needs: tuple[str, ...]
    weight: float
    lacks: str


def rows(lines: Iterable[str]) -> Iterator[Row]:
    """Yield a row for each model."""
    table = csv.DictReader((line for line in lines if not line.startswith("#")), delimiter="\t")
    for each in table:
        needs = tuple(each["needs"].split())
        yield Row(each["model"], needs, float(each["weight"]), _lacks(each["model"], needs))


def _lacks(model: str, needs: tuple[str, ...]) -> str:
    known = (name for pattern, name in PUBLISHED if fnmatch(model, pattern))
    architecture = next(known, None)
    if architecture not in ARCHITECTURES:
        return f"needs {' '.join(needs)}" if architecture is None else f"is {architecture}"
    formats = [FORMATS[need] for need in needs if need in FORMATS]
    return next((f"is in {each}" for each in formats if each not in READS), "")


def report(found: list[Row]) -> str:
    """Return the coverage as text: each row that is not loaded, then the sums."""

    def share(of: list[Row]) -> str:
        loaded = [row for row in of if not row.lacks]
        total = sum(row.weight for row in of)
        part = sum(row.weight for row in loaded) / total if total else 0.0
        return f"{len(loaded)} of {len(of)} models, {part:.0%} by weight"

    in_scope = [row for row in found if set(row.needs) <= IN_SCOPE]
    lines = [f"{row.model} {row.lacks}" for row in found if row.lacks]
    lines += [f"in scope: {share(in_scope)}", f"all: {share(found)}"]
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/model_coverage.py FILE")
    print(report(list(rows(Path(sys.argv[1]).read_text().splitlines()))))
