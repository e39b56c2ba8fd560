"""The flags of `weft bench`. Light: the command line reads them all to print its help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

POSITIVE = click.IntRange(min=1)
NOT_NEGATIVE = click.IntRange(min=0)
FILE = click.Path(path_type=Path)

_OPTIONS = (
    click.option(
        "--url", metavar="URL", default="http://127.0.0.1:8000/v1", show_default=True,
        help="the server's API",
    ),
    click.option("--model", metavar="NAME", help="on the server; else the first that it lists"),
    click.option(
        "--users", metavar="N,...",
        help="closed loop: so many at once, each asking again when answered; a run for each N "
        "[default: 1,4,16, unless --rate is given]",
    ),
    click.option(
        "--rate", metavar="R,...",
        help="open loop: conversations that arrive per second (Poisson); a run for each R",
    ),
    click.option(
        "--count", type=POSITIVE, metavar="N",
        help="conversations of each run; else four per user or 60 s of a rate, at least 16",
    ),
    click.option(
        "--prompt", metavar="LENGTH", default="128", show_default=True,
        help="tokens of a prompt: 128, 64-256 (uniform) or ~200 (exponential, by its mean)",
    ),
    click.option(
        "--output-tokens", metavar="LENGTH", default="128", show_default=True,
        help="tokens of an answer, written likewise",
    ),
    click.option(
        "--shared-prefix", type=NOT_NEGATIVE, metavar="N", default=0,
        help="tokens ahead of each conversation that it shares with its group",
    ),
    click.option(
        "--prefix-groups", type=POSITIVE, metavar="N", default=1,
        help="how many shared prefixes there are  [default: 1]",
    ),
    click.option(
        "--turns", type=POSITIVE, metavar="N", default=1,
        help="requests of a conversation, each with all that was said; needs --chat  [default: 1]",
    ),
    click.option("--chat", is_flag=True, help="use the chat API instead of completions"),
    click.option(
        "--tokenizer", metavar="PATH",
        help="the model's tokenizer: prompts are token ids of exact length, instead of words",
    ),
    click.option(
        "--temperature", type=click.FloatRange(0, 2), metavar="T", default=0.0,
        help="of every request  [default: 0]",
    ),
    click.option(
        "--ignore-eos/--no-ignore-eos", default=True,
        help="ask for answers that are exactly as long as wanted, by the field ignore_eos that "
        "weft, vLLM, SGLang and llama.cpp know  [default: yes]",
    ),
    click.option(
        "--target", metavar="LIMITS",
        help="what counts as good, in seconds: ttft=1.0,tpot=0.1,latency=20, any of them",
    ),
    click.option(
        "--warm-up", type=NOT_NEGATIVE, metavar="N", default=1,
        help="conversations before the first run, not counted  [default: 1]",
    ),
    click.option(
        "--timeout", metavar="SECONDS", default="600", show_default=True,
        help="a request that takes longer has failed",
    ),
    click.option(
        "--seed", type=NOT_NEGATIVE, metavar="N",
        help="of prompts, lengths and arrivals; else another each time",
    ),
    click.option("--output", type=FILE, metavar="FILE", help="write all figures there as JSON"),
    click.option("--json", "as_json", is_flag=True, help="write them to stdout, not a table"),
    click.option(
        "--plot", type=FILE, metavar="FILE",
        help="draw latency against rate; .png, .svg or .pdf",
    ),
    click.option("--quiet", is_flag=True, help="show no progress"),
)  # fmt: skip


def load_options(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command all flags but --api-key, which may come from the environment."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
