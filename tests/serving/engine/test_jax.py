"""`--backend jax`: served over HTTP, refused settings, and no compile once it serves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.checkpoints import make_checkpoint
from support.server import start_server

from weft import LLM, SamplingParams
from weft.errors import ConfigError
from weft.models.bundled.tasks import held_out
from weft.models.jax import platform
from weft.serving.config.settings import EngineConfig, Replica
from weft.serving.config.slices import NodeSlice
from weft.serving.engine.sampling_params import Grammar
from weft.serving.executor.jax_loading import check_settings
from weft.serving.executor.loading import uses_jax

SIZES: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "kv_cache_memory": 2**20,
}
TPU_SHAPE = {"num_hidden_layers": 1, "head_dim": 64, "hidden_size": 128}
"""Small, and such that all kernels take it."""

PROMPT = "the user asks the assistant for"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def _mixture(count: int) -> tuple[list[str], list[SamplingParams]]:
    """Prompts of all lengths, and settings of all kinds."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 1.0, "seed": 3, "top_p": 0.9},
        {"temperature": 0.8, "seed": 4, "top_k": 9, "min_p": 0.02},
        {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 0.7, "seed": 5, "logit_bias": {7: 4.0}, "min_tokens": 3},
        {"temperature": 1.0, "seed": 6, "grammar": Grammar("regex", "[a-c ]+")},
        {"temperature": 1.0, "seed": 7, "allowed_token_ids": tuple(range(3, 200, 7))},
        {"temperature": 0.0, "bad_words": ("a", "the", "one more"), "top_k": -1},
        {"temperature": 1.0, "top_p": 0.0},
    ]
    prompts = [f"{PROMPT} {'one more ' * (i % 13)}thing" for i in range(count)]
    params = [
        SamplingParams(max_tokens=3 + i % 7, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(count)
    ]
    return prompts, params


def test_a_mixed_run_compiles_nothing_and_answers_as_torch(model: Path, cache: Path) -> None:
    prompts, params = _mixture(200)
    with LLM(model, threads=1, backend="torch", **SIZES) as llm:
        expected = [answer.token_ids for answer in llm.generate(prompts, params)]
        vectors = llm.embed(prompts)
    with LLM(model, backend="jax", compile_cache=str(cache), **SIZES) as llm:
        counter = platform.CompileCounter()
        answers = llm.generate(prompts, params)
        np.testing.assert_allclose(llm.embed(prompts), vectors, atol=1e-4)
        counter.close()
    assert counter.count == 0
    assert [answer.token_ids for answer in answers] == expected


@pytest.mark.features("tpu", "tp", "ep")
def test_served_over_http_on_two_devices_of_one_process(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    settings = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    with LLM(model, threads=1, backend="torch", **SIZES) as llm:
        (expected,) = llm.generate([PROMPT], [SamplingParams(**settings)])
    jax = {"backend": "jax", "tp": 2, "ep": 2, "compile_cache": cache}
    with start_server(model, tmp_path, **SIZES, **jax) as server:
        (engine,) = psutil.Process(server.process.pid).children()
        assert not engine.children()
        body = settings | {"prompt": PROMPT, "model": server.model}
        with ThreadPoolExecutor(4) as pool:
            answers = list(
                pool.map(lambda _: server.http.post("/v1/completions", json=body), range(4))
            )
        log = server.log.read_text()
        metrics = server.http.get("/metrics").text
    assert re.search(r"^weft_engine_compilations_total{.*} 0.0$", metrics, re.MULTILINE)
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {expected.text}
    assert "compiled" in log
    assert "after warm-up" not in log


@pytest.mark.features("tpu", "overlapped", "tp", "ep")
@pytest.mark.slow
def test_kernels_of_tpus_serve_on_two_interpreted_devices(cache: Path, tmp_path: Path) -> None:
    """Attention, products, experts and their exchange: what a TPU runs, from HTTP to HTTP."""
    model = make_checkpoint(tmp_path / "model", "qwen3_moe", **TPU_SHAPE)
    prompt = f"{PROMPT} all of this, once more and at length, so that"
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    sizes = SIZES | {"max_num_batched_tokens": 64}
    with LLM(model, threads=1, backend="torch", **sizes) as llm:
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        (expected,) = llm.generate([prompt], params)
        assert 32 < len(expected.prompt_token_ids) <= 64  # of a step that deals out tokens
    jax = {"backend": "jax", "tp": 2, "ep": 2, "kernels": "overlapped", "compile_cache": cache}
    with start_server(model, tmp_path, **sizes, **jax) as server:
        answer = server.http.post("/v1/completions", json=body | {"model": server.model})
        assert answer.status_code == 200
        assert "on CPUs kernels are interpreted" in server.log.read_text()
    assert answer.json()["choices"][0]["text"] == expected.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cp": 2}, "--cp is 2; with --backend jax it must be 1"),
        ({"pp": 2}, "--pp is 2; with --backend jax it must be 1"),
        ({"quantization": "int8"}, "--quantization is int8; with --backend jax it must be none"),
        ({"device": "cuda"}, "--device is cuda; with --backend jax it must be auto, cpu or tpu"),
        ({"tp": 2, "ep": 4}, "--ep is 4 beside --tp 2; with --backend jax it must divide --tp"),
    ],
)
def test_settings_that_jax_has_not(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(EngineConfig(**settings))


def test_who_runs_a_model() -> None:
    assert uses_jax(EngineConfig(backend="jax"))
    assert not uses_jax(EngineConfig(backend="torch"))
    assert not uses_jax(EngineConfig())  # no TPU here


@pytest.mark.parametrize(
    ("vendor", "device", "count"),
    [
        ("0x1ae0", "0x0063", 1),
        ("0x1ae0", "0x0076", 2),
        ("0x1ae0", "0x0042", 0),
        ("0x8086", "0x0063", 0),
    ],
)
def test_only_tpus_count_as_such(tmp_path: Path, vendor: str, device: str, count: int) -> None:
    """And not other devices of Google's, such as a network card."""
    folder = tmp_path / "sys/bus/pci/devices/0000:00:05.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")
    assert len(platform.tpu_memory(tmp_path)) == count


def test_engines_that_share_tpus_are_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(platform, "_chips", lambda root: 8 * ["v5e"])
    platform.keep_to((4, 5, 6, 7))
    assert os.environ == {
        "TPU_VISIBLE_CHIPS": "4,5,6,7",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
    monkeypatch.setattr(platform, "_chips", lambda root: 4 * ["tpu7x"])
    platform.keep_to((2, 3))
    assert os.environ["TPU_VISIBLE_CHIPS"] == "5", "of those that it was held to"
    with pytest.raises(ConfigError, match="--tp is 3; with --dp engines on TPUs have these sizes"):
        platform.keep_to((0, 1, 2))


def test_an_engine_of_several_must_have_its_tpus_on_one_machine() -> None:
    apart = Replica(slice=(NodeSlice(0, (0, 1)), NodeSlice(1, (0, 1))))
    config = EngineConfig(tp=4, dp=2, nodes=2, backend="jax", device="tpu", replica=apart)
    with pytest.raises(
        ConfigError, match="--dp is 2 and an engine has TPUs on 2 nodes; set --dp 1"
    ):
        check_settings(config)
    check_settings(replace(config, dp=1))


def test_without_jax_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'jax\[tpu\]>=0.10.2'"):
        platform.prepare(1)


def test_a_demo_answers_as_with_torch(cache: Path) -> None:
    """Token by token; experts on two devices."""
    chats = [question.messages for question in held_out("arithmetic", 8)]
    sizes = {**SIZES, "max_model_len": 96, "dtype": "float32"}
    answers = []
    for settings in (
        {"backend": "torch", "threads": 1},
        {"backend": "jax", "tp": 2, "ep": 2, "compile_cache": str(cache)},
    ):
        with LLM("weft-demo-moe", **sizes, **settings) as llm:
            told = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=16))
        answers.append([answer.token_ids for answer in told])
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["weft-demo", "weft-demo-moe"])
def test_eval_scores_as_with_torch(name: str, tp: int, cache: Path) -> None:
    """On 1, 2 and 4 devices, among which experts are dealt out where there are some."""
    ep = tp if name == "weft-demo-moe" else 1
    sizes = ["--max-num-seqs", "16", "--max-num-batched-tokens", "512"]
    split = ["--tp", str(tp), "--ep", str(ep), "--compile-cache", str(cache)]
    scores = []
    for flags in (["--backend", "torch"], ["--backend", "jax", *split]):
        command = [sys.executable, "-m", "weft", "eval", name, "--json", "--count", "10"]
        command += ["--dtype", "float32", *sizes, *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        scores.append(
            [(one["task"], one["right"], one["tokens"]) for one in json.loads(done.stdout)]
        )
    assert scores[0] == scores[1]
