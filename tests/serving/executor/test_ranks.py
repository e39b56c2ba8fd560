"""A model on several ranks, served over HTTP."""

from __future__ import annotations

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from support.checkpoints import make_checkpoint
from support.processes import shared_memory_left_alone, wait_until_gone
from support.server import Server, start_server

from weft import LLM, SamplingParams
from weft.errors import ConfigError
from weft.models.bundled.tasks import TASKS, held_out
from weft.serving.cli.eval import MAX_ANSWER
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.sampling_params import Grammar
from weft.serving.executor.loading import check_ranks

PROMPT = "the user asks the assistant for"
PROMPTS = [f"{PROMPT} {'one more ' * i}thing" for i in range(9)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SIZES = {"kv_cache_memory": 2**22, "max_num_seqs": 2, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with LLM(model, threads=2, **SIZES) as llm:
        return [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]


def complete(server: Server, max_tokens: int = 16) -> str:
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    response = server.http.post("/v1/completions", json=body | {"ignore_eos": True})
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def ranks_of(server: Server) -> list[psutil.Process]:
    (engine,) = psutil.Process(server.process.pid).children()
    return sorted(engine.children(), key=lambda process: process.pid)


def test_two_ranks_answer_as_one_and_a_dead_one_is_named(model: Path, tmp_path: Path) -> None:
    sizes = {"kv_cache_memory": 2**22, "max_num_seqs": 4}
    with start_server(model, tmp_path, **sizes) as server:
        expected = complete(server)
    with start_server(model, tmp_path, tp=2, ep=2, **sizes) as server:
        ranks = ranks_of(server)
        assert len(ranks) == 2
        sockets = [socket for rank in ranks for socket in rank.net_connections()]
        listening = [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
        assert set(listening) == {"127.0.0.1"}
        assert complete(server) == expected
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": 400, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as got:
            lines = (line for line in got.iter_lines() if line)
            assert next(lines).startswith("data: ")
            ranks[1].kill()
            *_, last = (line for line in lines if "[DONE]" not in line)
        error = json.loads(last.removeprefix("data: "))["error"]
        assert f"rank 1 (process {ranks[1].pid}) was killed by SIGKILL in step " in error["message"]
        assert server.process.wait(60) != 0
        wait_until_gone([rank.pid for rank in ranks])


@pytest.mark.features("tp", "grammar")
def test_ranks_that_share_the_vocabulary_keep_to_a_grammar(model: Path) -> None:
    grammar = Grammar("regex", "([a-f]{4} ){3}[0-9]+x")
    params = [
        SamplingParams(temperature=hot, max_tokens=100, seed=3, grammar=grammar)
        for hot in (0.0, 2.0, 0.0)
    ]
    with LLM(model, threads=2, **SIZES) as llm:
        expected = [answer.token_ids for answer in llm.generate(PROMPTS[:3], params)]
    with LLM(model, tp=2, threads=2, **SIZES) as llm:
        answers = llm.generate(PROMPTS[:3], params)
    assert [answers[i].token_ids for i in (0, 2)] == [expected[i] for i in (0, 2)]
    for answer in answers:
        if answer.finish_reason == "stop":
            assert re.fullmatch(grammar.text, answer.text)
        else:
            assert re.fullmatch("([a-f]{4} ){3}[0-9]+", answer.text)


@pytest.mark.features("cp", "ep")
@pytest.mark.features("cp", "prefix_cache")
@pytest.mark.features("cp", "preemption")
def test_ranks_that_share_positions_answer_as_one(model: Path) -> None:
    """Outputs stay the same after preemptions and with the prefix cache."""
    prompts = [f"{PROMPT} {word} weather" for word in ("one", "two", "three", "four", "five")]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    sizes = {"block_size": 2, "max_num_seqs": 5, "max_model_len": 96, "threads": 2}
    with LLM(model, **sizes) as llm:
        expected = [answer.token_ids for answer in llm.generate(prompts, params)]
    with LLM(model, cp=2, ep=2, kv_cache_memory=26 * 1024, **sizes) as llm:
        assert (llm.info.block_size, llm.info.num_blocks) == (4, 26)
        for _ in range(2):
            answers = llm.generate(prompts, params)
            assert [answer.token_ids for answer in answers] == expected
        assert all(answer.cached_tokens >= 4 for answer in answers)
        engine = llm._engine
        assert engine is not None
        assert engine.stats.preemptions > 0


def test_a_rank_that_dies_while_nothing_is_asked_is_noticed(model: Path, tmp_path: Path) -> None:
    with start_server(model, tmp_path, tp=2, kv_cache_memory=2**22) as server:
        ranks_of(server)[0].kill()
        assert server.process.wait(60) != 0
        assert "rank 0 " in server.log.read_text()


@pytest.mark.parametrize(
    "split",
    [
        pytest.param({"tp": 2}, id="tp 2", marks=pytest.mark.features("pp", "tp")),
        pytest.param(
            {"ep": 2}, id="ep 2", marks=[pytest.mark.features("pp", "ep"), pytest.mark.slow]
        ),
    ],
)
def test_stages_answer_as_one_rank(
    split: dict[str, int], model: Path, expected: list[list[int]]
) -> None:
    with LLM(model, threads=2, pp=2, **SIZES, **split) as llm:
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == expected
        assert [answer.token_ids for answer in llm.generate(PROMPTS[0], GREEDY)] == expected[:1]


@pytest.mark.parametrize(
    "split",
    [{"ep": 2}, pytest.param({"tp": 2, "ep": 4}, marks=pytest.mark.slow)],
    ids=["ep 2", "tp 2, ep 4"],
)
def test_attention_groups_answer_as_one_rank(
    split: dict[str, int], model: Path, expected: list[list[int]]
) -> None:
    with LLM(model, threads=2, **SIZES, **split) as llm:
        assert llm.info.max_num_seqs == 2 * SIZES["max_num_seqs"]
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == expected
        assert [answer.token_ids for answer in llm.generate(PROMPTS[0], GREEDY)] == expected[:1]


@pytest.mark.slow
def test_the_bundled_mixture_gives_on_copies_of_attention_what_it_gives_on_one_rank() -> None:
    questions = [question for task in TASKS for question in held_out(task, 20)]
    wish = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER)
    replies: list[list[list[int]]] = []
    for split in ({}, {"ep": 2}, {"ep": 4}, {"tp": 2, "ep": 4}):
        with LLM("weft-demo-moe", dtype="float32", kv_cache_memory=2**26, **split) as llm:
            messages = [question.messages for question in questions]
            answers = llm.chat(messages, wish, tools=[question.tools for question in questions])
        replies.append([answer.token_ids for answer in answers])
        assert replies[-1] == replies[0], split


@pytest.mark.slow
def test_overlapped_kernels_answer_as_plain_ones(model: Path, tmp_path: Path) -> None:
    sizes = {"kv_cache_memory": 2**20, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    with start_server(model, tmp_path, **sizes) as server:
        expected = complete(server)
    with start_server(model, tmp_path, ep=2, kernels="overlapped", **sizes) as server:
        assert complete(server) == expected


def test_stages_on_overlapped_kernels_answer_as_one_rank(
    model: Path, expected: list[list[int]]
) -> None:
    few = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with LLM(model, pp=2, kernels="overlapped", **SIZES) as llm:
        answers = llm.generate(PROMPTS[:3], few)
    assert [answer.token_ids for answer in answers] == [tokens[:3] for tokens in expected[:3]]


@pytest.mark.slow
def test_ranks_that_share_an_fp8_cache_answer_as_one(model: Path, tmp_path: Path) -> None:
    fp8 = {"kernels": "overlapped", "kv_cache_dtype": "fp8"}
    answers = []
    for ranks in (1, 2):
        with start_server(model, tmp_path, cp=ranks, **fp8, **SIZES) as server:
            answers.append(complete(server, max_tokens=3))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 3}, "--tp is 3; it must divide the model's 4 heads. These sizes work: 1, 2, 4"),
        (
            {"kv_cache_dtype": "fp8"},
            "--kv-cache-dtype is fp8; on CPUs it must be auto, which keeps keys and values in "
            "--dtype. fp8 needs --device cuda",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    settings: dict[str, object], message: str, model: Path, tmp_path: Path
) -> None:
    with start_server(model, tmp_path, until="started", **settings) as server:
        assert server.process.wait(60) == 2
        assert server.log.read_text().splitlines()[-1] == f"weft: error: {message}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 3}, "--tp is 3; it must divide the model's 4 heads"),
        (
            {"tp": 2, "ep": 4, "kernels": "overlapped"},
            "--ep is 4 with --tp 2; with --kernels overlapped it must be at most 2",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused_before_a_rank_is_started(
    settings: dict[str, Any], message: str, model: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_ranks(EngineConfig(model=str(model), **settings))


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_killed_and_when_nothing_is_left(
    seed: int, model: Path, tmp_path: Path
) -> None:
    """Kill the engine or a rank, during loading or serving: the server ends and names it."""
    rng = random.Random(seed)
    sizes = {"kv_cache_memory": 2**22, "max_num_seqs": 4}
    until: Literal["started", "ready"] = "started" if seed % 3 == 0 else "ready"
    split = [{"tp": 2}, {"ep": 2}, {"pp": 2}][seed // 2 % 3]
    with (
        shared_memory_left_alone(),
        start_server(model, tmp_path, until=until, **split, **sizes) as server,
    ):
        server_process = psutil.Process(server.process.pid)
        if until == "started":
            deadline = time.monotonic() + 60
            while len(family(server_process)) < 4:  # server, engine, two ranks
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 4))
        everyone = family(server_process)
        victim = everyone[rng.choice([1, 2, 3])]
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            if until == "ready":
                answer = pool.submit(server.http.post, "/v1/completions", json=body)
                time.sleep(rng.uniform(0, 1))
            victim.kill()
            assert server.process.wait(60) not in (0, None)
            if until == "ready":
                got = answer.result()
                assert got.status_code in (200, 500, 503), got.text
                if got.status_code != 200:
                    assert "SIGKILL" in got.json()["error"]["message"]
        assert "SIGKILL" in server.log.read_text()
    wait_until_gone([process.pid for process in everyone])
