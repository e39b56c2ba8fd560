"""Flags from vLLM and llama.cpp: taken, or answered with advice."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from weft.errors import ConfigError
from weft.serving.cli.main import weft
from weft.serving.config.settings import EngineConfig
from weft.serving.config.sources import SETTINGS, from_arguments, resolve
from weft.serving.config.vllm_names import ADVICE, ALIASES, NO_OPS, VALUES

DOCUMENT = Path(__file__).parents[3] / "docs" / "coming-from-vllm.md"


def parsed(*arguments: str) -> dict[str, object]:
    """Return `weft serve`'s flags, before they are checked."""
    return weft.commands["serve"].make_context("serve", list(arguments)).params


@pytest.mark.parametrize("name", ALIASES)
def test_another_name_sets_the_same_setting(name: str) -> None:
    for alias in ALIASES[name]:
        on, slash, off = alias.partition("/")
        if on:
            assert parsed(on)[name] is True if slash else parsed(on, "7")[name] == "7"
        if off:
            assert parsed(off)[name] is False


def test_the_help_shows_weft_s_names_alone() -> None:
    text = weft.commands["serve"].get_help(click.Context(weft.commands["serve"]))
    others = [each for names in ALIASES.values() for name in names for each in name.split("/")]
    assert not [
        name
        for name in filter(None, (*others, *NO_OPS, *ADVICE))
        if re.search(rf"(?<![\w-]){name}\b", text)
    ]
    assert "--tp N" in text


def test_flags_for_what_weft_always_does_are_taken() -> None:
    assert parsed(*NO_OPS) == parsed()


@pytest.mark.parametrize("flag", ADVICE)
def test_a_flag_without_an_equivalent_gets_advice(flag: str) -> None:
    with pytest.raises(click.UsageError) as error:
        parsed(flag, "x")
    assert error.value.format_message() == f"There is no {flag}: {ADVICE[flag]}."
    for named in re.findall(r"--[a-z-]+", ADVICE[flag]):
        assert named[2:].replace("-", "_") in SETTINGS, named


@pytest.mark.parametrize(
    ("flag", "suggestion"),
    [
        ("--max-num-sequences", " Did you mean '--max-num-seqs'?"),
        ("--no-prefix-cacheing", " Did you mean '--no-prefix-caching'?"),
        ("--max-modellen", " Did you mean '--max-model-len'?"),
        ("--prot", " Did you mean '--port'?"),
        ("--log-level", ""),
        ("--config-format", ""),
        ("--cuda-graph-sizes", ""),
        ("--attention-config", ""),
        ("--disable-log-statistics", " Did you mean '--disable-log-stats'?"),
        ("-xyz", ""),
        ("--swap", ""),
    ],
)
def test_a_suggestion_is_very_similar_or_absent(flag: str, suggestion: str) -> None:
    with pytest.raises(click.NoSuchOption) as error:
        parsed(flag)
    assert error.value.format_message() == f"No such option '{flag}'.{suggestion}"


def test_python_takes_vllm_s_names() -> None:
    config = from_arguments({"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5})
    assert config == EngineConfig(tp=2, memory_fraction=0.5)
    config = from_arguments({"enforce_eager": True, "enable_prefix_caching": False})
    assert config == EngineConfig(cuda_graphs=False, prefix_caching=False)
    assert (
        from_arguments({"enforce_eager": False, "enable_chunked_prefill": True}) == EngineConfig()
    )
    with pytest.raises(ConfigError, match="no setting 'enable_chunked_prefill'"):
        from_arguments({"enable_chunked_prefill": False})
    with pytest.raises(ConfigError, match="no setting 'trust_remote_code': weft never runs code"):
        from_arguments({"trust_remote_code": True})


@pytest.mark.parametrize("name", VALUES)
def test_a_value_s_other_name_means_the_same(name: str) -> None:
    for alias, value in VALUES[name].items():
        assert resolve({name: alias}, {})[name].value == value
        assert resolve({}, {f"WEFT_{name.upper()}": alias})[name].value == value
        with pytest.raises(ConfigError, match="must be one of auto, "):
            resolve({name: alias + "x"}, {})


def test_each_flag_of_the_document_is_known() -> None:
    section = DOCUMENT.read_text().split("## Flags")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `-")]
    aliases = {each for names in ALIASES.values() for name in names for each in name.split("/")}
    settings = {setting.flag for setting in SETTINGS.values()}
    known = {*settings, *aliases, *NO_OPS, *ADVICE, "--config"}
    flags = [flag for row in rows for flag in re.findall(r"(--?[a-z][a-z-]*)", row)]
    assert len(flags) > 30
    assert sorted(set(flags) - known) == []
