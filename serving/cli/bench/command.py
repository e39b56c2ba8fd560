"""The flags of `weft bench`.

The other modules in this folder import slow libraries, so they are imported late.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from weft.serving.cli.options import TopicCommand, option

POSITIVE = click.IntRange(min=1)
NOT_NEGATIVE = click.IntRange(min=0)
FILE = click.Path(path_type=Path)

server = option("Server")
load = option("Load")
prompts = option("Prompts and answers")
results = option("Results")


@click.command(cls=TopicCommand)
@server(
    "--url",
    metavar="URL",
    default="http://127.0.0.1:8000/v1",
    show_default=True,
    help="base URL of the server's API",
)
@server("--model", metavar="NAME", help="model name; else the first that the server lists")
@server(
    "--api-key",
    envvar="OPENAI_API_KEY",
    metavar="KEY",
    help="API key; set it in OPENAI_API_KEY to keep it out of `ps`",
)
@server("--chat", is_flag=True, help="use the chat API instead of completions")
@server(
    "--timeout",
    metavar="SECONDS",
    default="600",
    show_default=True,
    help="count a request as failed after this time",
)
@load(
    "--users",
    metavar="N,...",
    help="closed loop: N concurrent users, who ask again after each answer; one run for each N "
    "[default: 1,4,16, unless --rate is given]",
)
@load(
    "--rate",
    metavar="R,...",
    help="open loop: R new conversations per second (Poisson); one run for each R",
)
@load(
    "--count",
    type=POSITIVE,
    metavar="N",
    help="conversations per run [default: 4 per user with --users, 60 seconds of arrivals with "
    "--rate; at least 16]",
)
@load(
    "--warm-up",
    type=NOT_NEGATIVE,
    metavar="N",
    default=1,
    help="conversations before the first run, not measured  [default: 1]",
)
@load(
    "--seed",
    type=NOT_NEGATIVE,
    metavar="N",
    help="seed for prompts, lengths and arrivals; else a new one each time",
)
@prompts(
    "--prompt",
    metavar="LENGTH",
    default="128",
    show_default=True,
    help="prompt tokens: 128, 64-256 (uniform) or ~200 (exponential, with this mean)",
)
@prompts(
    "--output-tokens",
    metavar="LENGTH",
    default="128",
    show_default=True,
    help="answer tokens, in the same notation",
)
@prompts(
    "--shared-prefix",
    type=NOT_NEGATIVE,
    metavar="N",
    default=0,
    help="tokens that all conversations of a group start with",
)
@prompts(
    "--prefix-groups",
    type=POSITIVE,
    metavar="N",
    default=1,
    help="number of groups, each with its own shared prefix  [default: 1]",
)
@prompts(
    "--turns",
    type=POSITIVE,
    metavar="N",
    default=1,
    help="requests per conversation, each with the whole history; needs --chat  [default: 1]",
)
@prompts(
    "--tokenizer",
    metavar="PATH",
    help="the model's tokenizer: prompts are token ids with exact lengths, instead of words",
)
@prompts(
    "--temperature",
    type=click.FloatRange(0, 2),
    metavar="T",
    default=0.0,
    help="sampling temperature  [default: 0]",
)
@prompts(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    help="get answers with exactly the requested length, by the field ignore_eos, which weft, "
    "vLLM, SGLang and llama.cpp support  [default: yes]",
)
@results(
    "--target",
    metavar="LIMITS",
    help="limits for a good request, in seconds: any of ttft=1.0,tpot=0.1,latency=20",
)
@results("--output", type=FILE, metavar="FILE", help="write all figures to this file as JSON")
@results("--json", "as_json", is_flag=True, help="write JSON to stdout instead of a table")
@results("--plot", type=FILE, metavar="FILE", help="plot latency against rate; .png, .svg or .pdf")
@results("--quiet", is_flag=True, help="hide the progress")
def bench(**options: Any) -> int:
    """Measure an OpenAI-compatible server under load.

    Any such server will do, not only weft. A table goes to stdout: token and request rates, time to
    first token (TTFT), time between tokens (ITL) and time to the end of the answer. Exits with 1 if
    a request failed. docs/benchmarking.md explains each figure.

    \b
    weft bench
    weft bench --users 1,16,64 --output-tokens 16-256 --target ttft=1,tpot=0.1
    weft bench --rate 1,2,4,8 --plot latency.png --output figures.json
    weft bench --chat --turns 4 --shared-prefix 500 --url http://127.0.0.1:9000/v1
    """
    from weft.serving.cli.bench.run import main

    return main(**options)
