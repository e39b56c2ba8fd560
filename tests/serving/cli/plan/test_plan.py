"""`weft plan` from its flags to its table, JSON, Helm values, formulas and picture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import tpu_steps
import yaml
from click.testing import CliRunner
from support.checkpoints import make_checkpoint

from weft.errors import ConfigError
from weft.models.plan.switches import Decision, Torus
from weft.serving.cli.main import weft

LOAD = "in=100,out=20,rate=2"
LLAMA_8B = tpu_steps.LLAMA_8B | {"num_hidden_layers": 32, "max_position_embeddings": 131072}
EIGHT = ("--for", "h100:8", "--load", LOAD)


def planned(*arguments: str) -> str:
    """The output of `weft plan`."""
    result = CliRunner().invoke(weft, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def rows(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(planned(*arguments, "--json"))["rows"]
    return found


def test_the_table_has_the_layouts_and_what_limits_them() -> None:
    text = planned("weft-demo", *EIGHT)
    assert text.startswith(f"weft-demo for {LOAD}\n")
    head, first = (line.split() for line in text.splitlines()[2:4])
    assert head[:3] == ["slice", "engines", "flags"]
    assert first[0] == "H100:8"
    assert "of a step is" in text
    assert "KV cache" in text


def test_no_row_beats_another() -> None:
    found = rows("weft-demo-moe", *EIGHT)
    figures = [
        (
            row["latency"]["ttft_p99"],
            row["latency"]["itl_p99"],
            -row["tokens_per_second"],
            row["dollars_per_million_tokens"],
        )
        for row in found
    ]
    for one in figures:
        assert not any(
            other != one and all(a <= b for a, b in zip(other, one, strict=True))
            for other in figures
        )


def test_a_slice_whose_layouts_are_all_beaten_has_its_best_one() -> None:
    alone = rows("weft-demo", "--for", "a100:1", "--load", LOAD)
    both = rows("weft-demo", "--for", "a100:1,mi300x:1", "--load", LOAD)
    assert [row for row in both if row["slice"] == "A100:1"] == alone[:1]
    assert both[0]["slice"] == "MI300X:1"


def test_shares_of_a_step_add_up() -> None:
    for row in rows("weft-demo", *EIGHT):
        assert sum(row["shares"].values()) == pytest.approx(1)


def test_more_devices_cost_more_and_serve_more() -> None:
    one = rows("weft-demo", "--for", "l40s:1", "--load", LOAD)[0]
    two = rows("weft-demo", "--for", "l40s:2", "--load", LOAD)[0]
    assert two["largest_rate"] > 1.5 * one["largest_rate"]


def test_rows_within_the_limits_come_first(tmp_path: Path) -> None:
    loose = rows("weft-demo", *EIGHT, "--slo", "ttft=10,itl=10")
    tight = rows("weft-demo", *EIGHT, "--slo", "itl=0.000001")
    assert all(row["within_slo"] for row in loose)
    assert not any(row["within_slo"] for row in tight)
    assert tight[0]["largest_rate"] == 0
    assert "! beyond the limits" in planned("weft-demo", *EIGHT, "--slo", "itl=0.000001")


def test_values_are_those_of_the_chart() -> None:
    values = yaml.safe_load(planned("weft-demo", "--for", "v5e:2x2", "--load", LOAD, "--values"))
    assert values["model"] == {"path": "weft-demo"}
    assert values["accelerator"] == {"type": "v5e", "topology": "2x2"}
    parallelism = values["parallelism"]
    assert parallelism["tp"] * parallelism.get("dp", 1) == 4
    assert values["settings"]["max_model_len"] == 2048


@pytest.mark.parametrize(
    ("topology", "defaults"),
    [
        ("h100:1", {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "memory_fraction": 0.9}),
        ("cpu:1", {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "memory_fraction": 0.8}),
    ],
)
def test_a_slice_is_planned_with_its_own_defaults(
    topology: str, defaults: dict[str, float]
) -> None:
    asked = ("weft-demo", "--for", topology, "--load", LOAD, "--values")
    assert yaml.safe_load(planned(*asked))["settings"].items() >= defaults.items()
    own = yaml.safe_load(planned(*asked, "--max-num-seqs", "7"))["settings"]
    assert own.items() >= (defaults | {"max_num_seqs": 7}).items()


def test_values_keep_what_was_planned(tmp_path: Path) -> None:
    file = tmp_path / "devices.toml"
    file.write_text('[mine]\nlike = "A100"\n')
    asked = ("--load", LOAD, "--values", "--devices", str(file))
    more = ("--memory-fraction", "0.5", "--block-size", "32", "--dtype", "float32")
    values = yaml.safe_load(planned("weft-demo", "--for", "mine:1", *asked, *more))
    accelerator = {"type": "mine", "types": {"mine": {"like": "a100-80gb"}}, "perHost": 1}
    assert values["accelerator"] == accelerator
    expected = {"memory_fraction": 0.5, "block_size": 32, "dtype": "float32"}
    assert values["settings"].items() >= expected.items()
    values = yaml.safe_load(planned("weft-demo", "--for", "a100:1", *asked))
    assert values["accelerator"]["type"] == "a100-80gb"
    file.write_text('[mine]\nlike = "cpu-amx"\n')
    values = yaml.safe_load(planned("weft-demo", "--for", "mine:1", *asked))
    assert values["accelerator"] == {"type": "mine", "types": {"mine": {"like": "cpu"}}}
    assert "int4" in planned("weft-demo", "--for", "mine:1", "--load", LOAD, "--devices", str(file))


def test_limits_are_shown_with_their_percentiles() -> None:
    text = planned("weft-demo", *EIGHT, "--slo", "ttft.p50=1,itl=0.5")
    assert text.splitlines()[0].endswith("within ttft p50 1 s, itl p99 0.5 s")


def test_a_slice_counts_once() -> None:
    assert rows("weft-demo", "--for", "h100:8,H100:8", "--load", LOAD) == rows("weft-demo", *EIGHT)


def test_formulas_show_each_operator() -> None:
    text = planned("weft-demo", *EIGHT, "--explain")
    for what in ("qkv", "attention", "gate + up", "lm head"):
        assert f"\n{what} " in text


def test_a_picture_shows_each_row(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    planned("weft-demo", *EIGHT, "--plot", str(picture))
    text = picture.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert text.count("H100:8") >= 2  # comments hold the texts that are drawn as paths
    for axis in ("US dollars", "share of a step", "first token, p50", "time between tokens, p50"):
        assert axis in text


def test_latencies_come_from_a_simulation_if_asked() -> None:
    load = ("--for", "l40s:2", "--load", "in=100,out=20,rate=400")
    formula, simulated = (
        rows("weft-demo", *load, *more)[0] for more in ((), ("--simulate", "4000"))
    )
    assert simulated["flags"] == formula["flags"]
    assert simulated["latency"] != formula["latency"]
    for name, seconds in simulated["latency"].items():
        assert seconds == pytest.approx(formula["latency"][name], rel=0.3)


def test_a_load_that_is_too_large_names_the_largest() -> None:
    text = planned("weft-demo", "--for", "l40s:1", "--load", "in=100,out=20,rate=999999")
    assert "no row serves this load: the most is" in text


def test_own_prices_count(tmp_path: Path) -> None:
    file = tmp_path / "devices.toml"
    file.write_text("[H100]\nprice = 29.5\n")
    dear = rows("weft-demo", *EIGHT, "--devices", str(file))[0]
    usual = rows("weft-demo", *EIGHT)[0]
    ratio = dear["dollars_per_million_tokens"] / usual["dollars_per_million_tokens"]
    assert ratio == pytest.approx(10)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("weft-demo", "--for", "h100:9", "--load", LOAD), "a node has 1 to 8 H100, not 9"),
        (("weft-demo", "--for", "gpu:8", "--load", LOAD), "the device 'gpu' is unknown"),
        (("weft-demo", "--for", "v5e:3x3", "--load", LOAD), "no such slice"),
        (("weft-demo", *EIGHT[:2], "--load", "in=5000,out=2,rate=1"), "5002 tokens"),
        (("weft-demo", *EIGHT[:2], "--load", "in=-1,out=2,rate=1"), "in of --load is '-1'"),
        (("weft-demo", *EIGHT[:2], "--load", "in=1,out=2,rate=1e99"), "rate of --load"),
        (("weft-demo", *EIGHT, "--slo", "speed=1"), "--slo has 'speed'"),
        (("weft-demo", *EIGHT, "--json", "--values"), "one of --json, --values"),
        (("weft-demo", *EIGHT, "--simulate", "9", "--routing", "best"), "routing"),
        (("weft-demo", *EIGHT, "--routing", "random"), "--routing is random; it needs --simulate"),
        (("weft-demo", *EIGHT, "--why", "--values"), "--explain, --why and --calibrate"),
        (("weft-demo", *EIGHT, "--why"), "--why is without --load"),
        (("weft-demo", *EIGHT, "--slo", "itl=1e-6", "--values"), "no row serves it"),
        (("weft-demo", *EIGHT[:2]), "--load is missing"),
        (("weft-demo", *EIGHT, "--tp", "3"), "--tp is 3; on h100:8 it must be one of 1, 2, 4"),
        (("weft-demo", *EIGHT[:2], "--tp", "16", "--why"), "--tp is 16; H100:8 has 8 devices"),
        (("weft-demo", *EIGHT[:2], "--tp", "3", "--why"), "--tp is 3; it must divide"),
        (("weft-demo", *EIGHT, "--plot", "plan.txt"), "its name must end in"),
        (("weft-demo", *EIGHT, "--max-model-len", "4096"), "has a context of 2048"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        planned(*arguments)


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama")
    file = tmp_path / "devices.toml"
    file.write_text('[tiny]\nlike = "H100"\nmemory = 2000000\n')
    with pytest.raises(ConfigError, match="does not fit on tiny:1: its weights take"):
        planned(str(model), "--for", "tiny:1", "--load", LOAD, "--devices", str(file))
    text = planned(str(model), "--for", "tiny:1,h100:1", "--load", LOAD, "--devices", str(file))
    assert "does not fit on tiny:1" in text


@pytest.mark.parametrize(
    ("place", "more", "says"),
    [
        (
            "cpu:1",
            ("--max-model-len", "2048", "--memory-fraction", "0.3"),
            "with the best layout and int4 weights; choose a larger slice or a smaller model$",
        ),
        ("cpu:2", (), "int4 weights; it would fit with --max-model-len 32768$"),
        ("v6e:1x1", (), "the best layout; it would fit with --max-model-len 65536$"),
    ],
)
def test_a_misfit_counts_the_formats_that_are_served(
    place: str, more: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    with pytest.raises(ConfigError, match=says):
        planned(str(tmp_path), "--for", place, "--load", LOAD, *more)


def test_the_cheapest_slice_for_a_small_load_comes_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    found = rows(str(tmp_path), "--for", "h100:8,h100:1", "--load", LOAD)
    assert [row["slice"] for row in found][:2] == ["H100:1", "H100:8"]
    assert found[0]["dollars_per_hour"] * 8 == found[1]["dollars_per_hour"]


@pytest.mark.parametrize(
    ("load", "slo", "says"),
    [
        ("in=100,out=20,rate=1e5", "", "no row serves this load: the most is "),
        (LOAD, "ttft=1e-6", "within ttft p99 1e-06 s: no rate is within the limits"),
    ],
)
def test_a_load_that_no_row_serves(load: str, slo: str, says: str) -> None:
    text = planned("weft-demo", "--for", "l40s:1", "--load", load, "--slo", slo)
    assert says in text
    assert " 0 requests/s" not in text


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        (8, "lacks 24.60 GiB .* Weights with 8 bits would fit"),
        (2, "lacks .* Weights with 4 bits would fit"),
        (1, "choose a larger slice or a smaller model$"),
    ],
)
def test_weights_with_fewer_bits_that_would_fit(devices: int, says: str, tmp_path: Path) -> None:
    config = LLAMA_8B | {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    slice = f"h200:{devices}" if devices == 2 else f"h100:{devices}"
    with pytest.raises(ConfigError, match=says):
        planned(str(tmp_path), "--for", slice, "--load", LOAD, "--max-model-len", "1024")


def test_only_layouts_with_the_given_tp_are_planned() -> None:
    found = rows("weft-demo", *EIGHT, "--tp", "2")
    assert {row["layout"]["tp"] for row in found} == {2}


def test_why_tells_the_default_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    text = planned(str(tmp_path), "--for", "l40s:4,v5e:2x2,cpu:2", "--why")
    assert re.findall("^  (without --tp.*)", text, re.MULTILINE) == [
        "without --tp, it is 1: it fits over 1",
        "without --tp, it is 4: with --tp 1, each device lacks 19.62 GiB; with --tp 2, each device "
        "lacks 3.54 GiB; it fits over 4",
    ]
    assert "without --tp" not in planned(str(tmp_path), "--for", "l40s:4", "--tp", "2", "--why")


def test_why_tells_the_decisions_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    text = planned("weft-demo", "--for", "v5e:2x2,h100:4,cpu:2", "--tp", "2", "--why")
    monkeypatch.setattr(Torus, "shards_tokens", lambda *_: Decision(True, "told so"))
    monkeypatch.setattr(Torus, "gathers_weights", lambda *_: Decision(True, "told so"))
    sharded = planned("weft-demo", "--for", "v5e:2x2", "--tp", "2", "--why")
    assert sharded.splitlines()[:3] == [
        "v5e:2x2 --tp 2",
        "  32: tokens are sharded: told so",
        "  32: weights travel: told so",
    ]
    assert (
        "  without --block-size, it is 128: a copy starts in 32 ns, while v5e reads 102 t" in text
    )
    assert re.search(
        r"  steps with one token for each request are padded to [\d, ]+, 128 tokens, others to "
        r"[\d, ]+, 2048: padding adds at most 25% and 50% to a step's seconds\n",
        text,
    )
    assert "  32: tokens are replicated: all layers' products and exchanges take" in text
    assert re.search(
        r"up to (\d+) tokens, products send their sums; up to \1, an all-reduce follows them; with "
        "more, tokens are sharded: with 1024 tokens, a layer's products take .* us, .* us, ",
        text,
    )
    assert text.endswith("cpu:2 --tp 2\n  nothing to decide: there is one way to run a step\n")
