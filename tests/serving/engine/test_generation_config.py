"""A checkpoint's sampling defaults: read, refused, and in force everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf
from support.server import start_server
from transformers import AutoModelForCausalLM

from weft import LLM, SamplingParams
from weft.errors import ConfigError, ModelError
from weft.models.spec.config_table import READ_FOR_TEXT
from weft.serving.cli.options import greedy_by_default
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.generation_config import FIELDS, load_generation_config
from weft.serving.engine.model_files import warn_of_ignored_defaults
from weft.serving.engine.sampling_params import NEUTRAL, SamplingDefaults

VALUES = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
VALUES |= {"repetition_penalty": 1.05, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    write(path, {"do_sample": True, "top_k": 1, "max_new_tokens": 5})
    return path


def write(path: Path, content: dict[str, Any]) -> None:
    (path / "generation_config.json").write_text(json.dumps(content))


def load(path: Path, choice: str = "model") -> SamplingDefaults:
    return load_generation_config(EngineConfig(str(path), generation_config=choice)).defaults


def test_fields_of_the_file(tmp_path: Path) -> None:
    assert load(tmp_path) == NEUTRAL
    write(tmp_path, {"eos_token_id": 2, "temperature": None, "top_k": 50})
    found = load_generation_config(EngineConfig(str(tmp_path)))
    assert found.defaults == SamplingDefaults(top_k=50)
    assert found.described()["top_k"] == {"value": 50, "source": "generation_config.json"}
    assert found.described()["temperature"] == {"value": 1.0, "source": "default"}
    write(tmp_path, VALUES)
    expected = SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.05, max_tokens=5
    )
    assert load(tmp_path) == load(tmp_path, "auto") == expected
    assert load(tmp_path, "none") == load(tmp_path, "vllm") == NEUTRAL


def test_fields_that_would_change_answers_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not those with a value without effect, and not those that only training reads."""
    neutral = {"num_beams": 1, "suppress_tokens": [], "length_penalty": 1.0, "max_length": 20}
    write(tmp_path, VALUES | neutral)
    assert load_generation_config(EngineConfig(str(tmp_path))).ignored == ()
    write(tmp_path, VALUES | neutral | {"no_repeat_ngram_size": 3, "suppress_tokens": [5]})
    found = load_generation_config(EngineConfig(str(tmp_path)))
    assert found.ignored == ("no_repeat_ngram_size", "suppress_tokens")
    warn_of_ignored_defaults(found)
    assert caplog.messages == [
        "weft does not follow no_repeat_ngram_size, suppress_tokens of generation_config.json"
    ]


def test_without_the_file_config_json_has_the_fields(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | VALUES))
    (path / "generation_config.json").write_text("{}")
    assert load(path) == NEUTRAL
    (path / "generation_config.json").unlink()
    found = load_generation_config(EngineConfig(str(path)))
    assert found.described()["top_k"] == {"value": 20, "source": "config.json"}
    theirs = AutoModelForCausalLM.from_pretrained(path).generation_config
    for name, field in FIELDS.items():
        assert getattr(found.defaults, name) == getattr(theirs, field) == VALUES[field]
        assert field in READ_FOR_TEXT
    assert load(path, "none") == NEUTRAL


def test_a_gguf_file_has_them_in_its_metadata(checkpoint: Path, tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        writer.add_sampling_temp(0.6)
        writer.add_sampling_penalty_repeat(1.05)
        writer.add_sampling_mirostat(2)
        writer.add_sampling_xtc_probability(0.0)

    file, _ = write_gguf(checkpoint, tmp_path, change=change)
    found = load_generation_config(EngineConfig(str(file)))
    assert found.defaults == SamplingDefaults(temperature=0.6, repetition_penalty=1.05)
    assert found.described()["temperature"] == {"value": 0.6, "source": "m.gguf"}
    assert found.ignored == ("general.sampling.mirostat",)
    assert load(file, "none") == NEUTRAL


def test_another_file(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write(tmp_path, {"top_k": 1})
    write(other, {"top_k": 2})
    file = other / "generation_config.json"
    assert load(tmp_path, str(other)).top_k == load(tmp_path, str(file)).top_k == 2
    missing = str(tmp_path / "nope")
    with pytest.raises(ConfigError, match=f"--generation-config is {missing}; it must be model"):
        load(tmp_path, missing)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number;"),
        ({"max_new_tokens": True}, "max_new_tokens is true; it must be an integer;"),
        ({"top_p": 3}, "top_p is 3"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be an integer;"),
    ],
)
def test_a_wrong_value_names_the_file_and_the_field(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    write(tmp_path, content)
    with pytest.raises(ModelError) as error:
        load(tmp_path)
    assert str(tmp_path / "generation_config.json") in str(error.value)
    assert message in str(error.value)
    assert str(error.value).endswith("; --generation-config none ignores the file")


def test_a_request_s_own_value_comes_first() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20)
    assert SamplingParams().chosen(defaults) == defaults
    assert SamplingParams(top_k=0).chosen(defaults) == SamplingDefaults(temperature=0.6)
    assert SamplingParams(temperature=1.0).chosen(defaults).temperature == 1.0


def test_the_python_class_uses_them(checkpoint: Path) -> None:
    with LLM(checkpoint, threads=1) as llm:
        first, second = llm.generate(
            ["one two"] * 2, [SamplingParams(seed=1), SamplingParams(seed=2)]
        )
        assert first.text == second.text  # top_k 1 is greedy
        assert len(first.token_ids) == 5
        (long,) = llm.generate("one two", SamplingParams(max_tokens=9, ignore_eos=True))
        assert len(long.token_ids) == 9
        (least,) = llm.generate("one two", SamplingParams(min_tokens=7, ignore_eos=True))
        assert len(least.token_ids) == 7
        free = [SamplingParams(seed=seed, top_k=0, temperature=2.0) for seed in (1, 2)]
        first, second = llm.generate(["one two"] * 2, free)
        assert first.text != second.text
        assert greedy_by_default(SamplingParams(), llm).temperature == 0.0
    write(checkpoint, {"top_k": 1, "max_new_tokens": 5, "temperature": 0.5})
    try:
        with LLM(checkpoint, threads=1) as llm:
            assert greedy_by_default(SamplingParams(), llm).temperature is None
    finally:
        write(checkpoint, {"do_sample": True, "top_k": 1, "max_new_tokens": 5})
    with LLM(checkpoint, threads=1, generation_config="none", max_model_len=32) as llm:
        (whole,) = llm.generate("one two", SamplingParams(ignore_eos=True))
        assert len(whole.token_ids) > 5


def texts(http: httpx.Client, url: str, body: dict[str, Any]) -> set[str]:
    """Return the different answers from three tries; each draws its own seed."""
    found = set()
    for _ in range(3):
        answer = http.post(url, json=body)
        assert answer.status_code == 200, answer.text
        found.add(json.dumps(answer.json().get("choices") or answer.json().get("content")))
    return found


def test_each_route_uses_them_and_the_model_shows_them(checkpoint: Path, tmp_path: Path) -> None:
    with start_server(checkpoint, tmp_path) as server:
        model = server.http.get(f"/v1/models/{server.model}").json()
        assert model["sampling_defaults"]["top_k"] == {
            "value": 1,
            "source": "generation_config.json",
        }
        assert model["sampling_defaults"]["temperature"] == {"value": 1.0, "source": "default"}
        messages = [{"role": "user", "content": "one two"}]
        for url, prompt in (
            ("/v1/completions", {"prompt": "one two"}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/messages", {"messages": messages, "max_tokens": 4}),
        ):
            assert len(texts(server.http, url, {"model": server.model} | prompt)) == 1
        answer = server.http.post(
            "/v1/completions", json={"model": server.model, "prompt": "one two"}
        ).json()
        assert answer["usage"]["completion_tokens"] <= 5
        response = server.http.post(
            "/v1/responses", json={"model": server.model, "input": "one two"}
        ).json()
        assert (response["temperature"], response["top_p"]) == (1.0, 1.0)
    with start_server(checkpoint, tmp_path, generation_config="none") as server:
        body = {"model": server.model, "prompt": "one two", "max_tokens": 5}
        assert len(texts(server.http, "/v1/completions", body)) == 3
