"""Writes docs/features.md: which features work together, by which test, and which are refused.

python tools/feature_table.py          # write the file

A test with `@pytest.mark.features("tp", "grammar")` shows that each pair of these features works. A
refusal is provoked here, and its message quoted. A pair with neither is an empty cell: the test of
this page fails.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/features.md"
SLOW = "pytest.mark.slow"

FEATURES = {
    "cpu": "CPUs, with plain kernels",
    "gpu": "GPUs, with Triton's kernels",
    "tpu": "TPUs: `--backend jax`",
    "tp": "`--tp`",
    "ep": "`--ep`",
    "cp": "`--cp`",
    "pp": "`--pp`",
    "dp": "`--dp`",
    "nodes": "several nodes: `--nodes`, Ray",
    "int8": "`--quantization int8`",
    "quantised": "quantised checkpoints",
    "fp8_cache": "`--kv-cache-dtype fp8`",
    "overlapped": "`--kernels overlapped`",
    "graphs": "CUDA graphs",
    "grammar": "grammars: `response_format`, `guided_regex`, ...",
    "tools": "tools: calls are parsed or forced",
    "logprobs": "`logprobs`",
    "prompt_logprobs": "`prompt_logprobs`, `echo`",
    "penalties": "penalties: repetition, presence, frequency",
    "n": "`n`",
    "seed": "`seed`",
    "priority": "`priority`",
    "embeddings": "embeddings",
    "prefix_cache": "prefix cache",
    "preemption": "preemption",
    "batches": "batches: `weft batch`, `/v1/batches`",
    "restart": "`--restart`: an engine that failed is started again",
    "drain": "drain: a shutdown lets requests finish",
}
"""A feature's name in marks, and its row."""

ALONE = {
    ("cpu", "gpu"): "`--device` has one value",
    ("cpu", "tpu"): "`--device` has one value",
    ("gpu", "tpu"): "`--device` has one value",
    ("cpu", "overlapped"): "`--kernels` has one value",
    ("cpu", "graphs"): "only GPUs have CUDA graphs",
    ("tpu", "graphs"): "only GPUs have CUDA graphs",
}
"""Pairs that nobody can ask for, and why."""

INTRODUCTION = """# Features together

This table has each pair. `python tools/feature_table.py` writes it. A test fails if a cell is empty
or out of date: whoever adds a feature adds its row, and tests for its pairs.

| cell | meaning |
| --- | --- |
| t1 | The two work together. [Test 1](#tests) fails if they do not. |
| r1 | The two are refused. [Refusal 1](#refusals) has the message. |
| - | Nobody can ask for both: a setting has one value, or only GPUs have CUDA graphs. |

These tests need no GPU and no TPU: Triton's interpreter runs GPU kernels, and jax runs on CPUs.
[The checklist](gpu-checklist.md) lists the open hardware checks. Tests marked "slow" run with
`make test-slow`. In `test_features.py`, each request has several features, and all cases compare
its answer with the one that it gets alone, on one rank.
"""


class Refusal(NamedTuple):
    """Pairs that one message refuses, and a function that raises or returns it."""

    pairs: tuple[tuple[str, str], ...]
    provoke: Callable[[], str | None]

    @property
    def message(self) -> str:
        """The message; AssertionError if nothing is refused."""
        from weft.errors import ConfigError

        try:
            message = self.provoke()
        except ConfigError as error:
            return str(error)
        assert message, f"{self.pairs} are not refused"
        return message


def refusals() -> list[Refusal]:
    """Return all refusals of pairs."""
    import torch

    from weft.models.spec.layout import Layout
    from weft.serving.config.settings import EngineConfig
    from weft.serving.executor.backend import choose_kernels
    from weft.serving.executor.jax_loading import check_settings

    def on(device: str, **settings: str) -> Callable[[], str | None]:
        config = EngineConfig(**settings)  # type: ignore[arg-type]
        return lambda: choose_kernels(config, Layout(), torch.device(device)) and None

    def with_jax(**settings: object) -> Callable[[], str | None]:
        return lambda: check_settings(EngineConfig(backend="jax", **settings))  # type: ignore[arg-type]

    made = [
        Refusal((("tpu", "cp"),), with_jax(cp=2)),
        Refusal((("tpu", "pp"),), with_jax(pp=2)),
        Refusal((("tpu", "int8"),), with_jax(quantization="int8")),
        Refusal((("tpu", "fp8_cache"),), with_jax(kv_cache_dtype="fp8")),
        Refusal((("cpu", "fp8_cache"),), on("cpu", kv_cache_dtype="fp8")),
    ]
    fields = {
        "grammar": "guided_regex",
        "tools": "tools",
        "logprobs": "logprobs",
        "prompt_logprobs": "prompt_logprobs",
        "penalties": "presence_penalty",
        "n": "n",
        "seed": "seed",
    }
    made += [
        Refusal(((feature, "embeddings"),), partial(_unknown, field))
        for feature, field in fields.items()
    ]
    return made


def _unknown(field: str) -> str:
    """Return what POST /v1/embeddings answers to a field."""
    import asyncio

    from weft.serving.api.app import build_app
    from weft.serving.api.local import LocalApi
    from weft.serving.api.state import ServerState

    api = LocalApi(build_app(ServerState("m")))
    body = json.dumps({"input": "x", field: 1}).encode()
    status, answer = asyncio.run(api.post("/v1/embeddings", body))
    assert status == 400, answer
    return f"POST /v1/embeddings: {json.loads(answer)['error']['message']}"


def pairs_of(features: Iterable[str]) -> set[tuple[str, str]]:
    """Return the pairs of some features, each in the table's order."""
    named = set(features)
    assert named <= FEATURES.keys(), f"no features: {sorted(named - FEATURES.keys())}"
    return set(combinations((name for name in FEATURES if name in named), 2))


def collect(root: Path = ROOT) -> dict[str, list[list[str]]]:
    """Return tests, by id, and the features of each of their marks.

    Raises:
        ValueError: a mark is not on a test or in a `pytest.param` of its cases, or has a name that
            is neither a text nor a tuple of texts in the module.
    """
    found: dict[str, list[list[str]]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        if "mark.features(" in (text := path.read_text()):
            for test, features in marks(ast.parse(text)):
                found.setdefault(f"{path.relative_to(root)}::{test}", []).append(features)
    return found


def marks(module: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield each test's name, with that of its case, and the features of a mark."""
    texts = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            value = ast.unparse(node.value)
            texts[ast.unparse(node.targets[0])] = value
    for test in module.body:
        if not isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        slow = any(ast.unparse(each) == SLOW for each in test.decorator_list)
        for decorator in test.decorator_list:
            cases = [node for node in ast.walk(decorator) if _calls(node, "pytest.param")]
            of_cases = {mark: case for case in cases for mark in ast.walk(case)}
            for mark in ast.walk(decorator):
                if not _calls(mark, "pytest.mark.features"):
                    continue
                name, case = test.name, of_cases.get(mark)
                if case is not None:
                    ids = (each.value for each in case.keywords if each.arg == "id")
                    name += "".join(f"[{ast.literal_eval(each)}]" for each in ids)
                is_slow = slow or (case is not None and SLOW in ast.unparse(case))
                features = []
                for argument in mark.args:
                    if isinstance(argument, ast.Starred):
                        features += ast.literal_eval(texts[ast.unparse(argument.value)])
                    else:
                        features.append(ast.literal_eval(argument))
                yield name + " (slow)" * is_slow, features


def _calls(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def shown_by(found: Mapping[str, list[list[str]]]) -> dict[tuple[str, str], str]:
    """Return for each pair the test with the fewest other features; a fast one precedes."""
    best: dict[tuple[str, str], tuple[bool, int, str]] = {}
    for test, marks in found.items():
        for features in marks:
            for pair in pairs_of(features):
                rank = (test.endswith("(slow)"), len(features), test)
                best[pair] = min(best.get(pair, rank), rank)
    return {pair: test for pair, (_, _, test) in best.items()}


class Cells(NamedTuple):
    """Each pair's cell, empty if there is none; the tests and the messages that cells number."""

    of_pair: dict[tuple[str, str], str]
    tests: list[str]
    messages: list[str]


def cells() -> Cells:
    """Return the cells; AssertionError if a test shows a pair that is refused."""
    tests = shown_by(collect())
    refused = [(refusal.pairs, refusal.message) for refusal in refusals()]
    of_pair = {pair: f"r{i}" for i, (pairs, _) in enumerate(refused, 1) for pair in pairs}
    assert not (twice := tests.keys() & of_pair.keys()), f"work and are refused: {sorted(twice)}"
    names = sorted(set(tests.values()))
    number = {test: f"t{i}" for i, test in enumerate(names, 1)}
    of_pair |= {pair: number[test] for pair, test in tests.items()} | dict.fromkeys(ALONE, "-")
    every = combinations(FEATURES, 2)
    messages = [message for _, message in refused]
    return Cells({pair: of_pair.get(pair, "") for pair in every}, names, messages)


def page(made: Cells) -> str:
    """Return the whole page."""
    names = list(FEATURES)
    rows = [
        [name, *(made.of_pair[before, name] for before in names[:i]), *[""] * (len(names) - 1 - i)]
        for i, name in enumerate(names)
        if i
    ]
    meanings = [[f"`{name}`", meaning] for name, meaning in FEATURES.items()]
    tests = [[f"t{i}", _link(test)] for i, test in enumerate(made.tests, 1)]
    messages = [[f"r{i}", message] for i, message in enumerate(made.messages, 1)]
    return "\n".join(
        [
            INTRODUCTION,
            _table(["name", "feature"], meanings),
            "## Pairs\n",
            _table(["", *names[:-1]], rows),
            "## Tests\n",
            _table(["", "test"], tests),
            "## Refusals\n",
            _table(["", "message"], messages),
        ]
    )


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[{Path(path).name}](../{path}) `{name}`"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(cells()))
