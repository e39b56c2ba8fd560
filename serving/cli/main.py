"""The `weft` command: the only reader of argv and the environment.

Results go to stdout, all else to stderr. The flags of a setting are made from
its field in config.py. An error raised on purpose is one line; the exit status
is then 1, or 2 when the command line or a setting is at fault, and 130 after
an interrupt. Each command imports what it needs when it runs, so that
`weft --version` stays quick.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

import click

from weft.errors import ConfigError, RequestError, WeftError
from weft.serving.cli.bench.options import load_options
from weft.serving.config import logs
from weft.serving.config.fields import Setting, settings_of
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.config.sources import Settings, resolve
from weft.version import __version__

if TYPE_CHECKING:
    from weft.serving.engine.sampling_params import SamplingParams

Command = Callable[..., int]


def main() -> NoReturn:
    """Run the command line, and exit with its status."""
    status = 1
    logs.configure()  # what a model is loaded with, also when that is in this process
    try:
        status = weft(prog_name="weft", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        status = _refuse(error.format_message(), 2)
    except WeftError as error:
        status = _refuse(str(error), 2 if isinstance(error, ConfigError) else 1)
    except click.Abort:  # click's word for an interrupt
        status = 130
    except BrokenPipeError:  # the reader has what it wanted, as in `weft ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if any(thread.name == "weft-core" for thread in threading.enumerate()):
        # It still loads a model that nobody wants any more. Python would stop it in the middle of
        # native code, which aborts the process.
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _refuse(message: str, status: int) -> int:
    logs.say(f"weft: error: {message}", logging.ERROR)
    return status


def takes(
    *configs: type[EngineConfig] | type[ServerConfig],
    model: bool = False,
    only: Collection[str] | None = None,
) -> Callable[[Command], Command]:
    """Give a command a flag for each setting, and the resolved `Settings` as first argument.

    Args:
        configs: the dataclasses whose settings the command can use.
        model: the model is the command's argument, instead of a flag.
        only: settings that the command can use, if not all of these.
    """
    taken = [
        setting
        for config in configs
        for setting in settings_of(config)
        if only is None or setting.name in only
    ]

    def decorate(function: Command) -> Command:
        def command(config_file: Path | None, **options: Any) -> int:
            given = {setting.name: options.pop(setting.name) for setting in taken}
            flags = {name: raw for name, raw in given.items() if raw is not None}
            settings = resolve(flags, os.environ, config_file)
            logs.configure(settings["log_format"].value)
            return function(settings, **options)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
        for setting in reversed(taken):
            if model and setting.name == "model":
                click.argument("model", required=False)(command)
            else:
                _flag(setting)(command)
        return click.option(
            "--config",
            "config_file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="TOML file of settings; WEFT_CONFIG names one too",
        )(command)

    return decorate


def _flag(setting: Setting) -> Any:
    """The click option of a setting. It has no default, so that what was not given shows."""
    default = "" if setting.default is None else f"  [default: {setting.default}]"
    if setting.type is bool:
        names = f"{setting.flag}/--no-{setting.flag[2:]}"
        return click.option(names, setting.name, default=None, help=setting.help.text + default)
    return click.option(
        setting.flag, setting.name, metavar=_metavar(setting), help=setting.help.text + default
    )


def _metavar(setting: Setting) -> str:
    if setting.help.unit == "bytes":
        return "SIZE"
    if get_origin(setting.type) is Literal:
        return "|".join(get_args(setting.type))
    return "TEXT" if str in (setting.type, *get_args(setting.type)) else "N"


@click.group(invoke_without_command=True, context_settings={"max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def weft(context: click.Context) -> int:
    """Serve large language models, and use them from the command line.

    \b
    weft generate "What is 47 + 85?"     one answer
    weft serve                           an OpenAI-compatible endpoint
    weft COMMAND --help                  more of each

    MODEL is the directory of a Hugging Face checkpoint, or a bundled model: weft-demo, which is
    taken if none is given, or weft-demo-moe.

    Every setting is a flag (--max-queue), a variable (WEFT_MAX_QUEUE) and a key of the
    --config file (max_queue); the first of these wins. `weft config` shows what is in force.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return 0


def sampling(function: Command) -> Command:
    """Give a command the flags of SamplingParams that one asks for by hand."""
    for flag, kind, text in (
        ("--top-k", int, "sample among the N most likely tokens"),
        ("--top-p", float, "sample among the likeliest tokens that make up this share"),
        ("--temperature", float, "0 always takes the likeliest token, 1 samples  [default: 0]"),
        ("--max-tokens", int, "most tokens of an answer; else the rest of the context"),
    ):
        click.option(flag, type=kind, metavar="N", help=text)(function)
    text = "end the answer at this text; may be given again"
    return click.option("--stop", multiple=True, metavar="TEXT", help=text)(function)


@weft.command()
@takes(EngineConfig, ServerConfig, model=True)
def serve(settings: Settings) -> int:
    """Serve MODEL over HTTP, with OpenAI's API.

    \b
    weft serve
    weft serve ./Qwen3-0.6B --port 9000 --max-model-len 4096
    """
    from weft.serving.api.server import serve

    return serve(settings.build(EngineConfig), settings.build(ServerConfig))


@weft.command()
@click.argument("head", metavar="HOST:PORT")
@click.option(
    "--once", is_flag=True, help="end with what the head serves, instead of waiting again"
)
@takes(EngineConfig, only=("node_address", "node_token", "node_ranks"))
def join(settings: Settings, head: str, once: bool) -> int:
    """Lend this machine to what HOST:PORT serves with --nodes.

    Waits for the head, runs the ranks that it deals out to this machine, ends them with it, and
    waits for it again, until SIGTERM or an interrupt, which end its ranks; it then exits with 0.
    Both need the same token, which WEFT_NODE_TOKEN keeps out of `ps`.

    \b
    WEFT_NODE_TOKEN=... weft serve MODEL --tp 4 --nodes 2     on one machine, 10.0.0.1
    WEFT_NODE_TOKEN=... weft join 10.0.0.1:7333               on the other one
    """
    from weft.serving.cli.join import run

    return run(settings.build(EngineConfig), head, once=once)


@weft.command()
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="continue the text, without the chat template")
@sampling
@takes(EngineConfig)
def generate(settings: Settings, prompt: str, raw: bool, **sampling: Any) -> int:
    """Answer PROMPT, or stdin if it is -.

    The answer is written as it comes.

    \b
    weft generate "What is 47 + 85?"
    weft generate --raw "Once upon a time" --max-tokens 40 --temperature 0.8
    weft generate --model ./Qwen3-0.6B - < question.txt
    """
    from weft.serving.cli.chat import decoded, write_answer
    from weft.serving.llm import LLM

    params = _params(sampling)
    text = decoded(sys.stdin.buffer.read()) if prompt == "-" else prompt
    with LLM.of(settings.build(EngineConfig)) as llm:
        chat = not raw and bool(llm.tokenizer.chat_templates)
        write_answer(llm, [{"role": "user", "content": text}] if chat else text, params)
    return 0


@weft.command()
@click.option("--system", metavar="TEXT", help="instructions that precede the conversation")
@sampling
@takes(EngineConfig, model=True)
def chat(settings: Settings, system: str | None, **sampling: Any) -> int:
    """Talk with MODEL.

    Each line is a turn, from the keyboard or from a pipe. /reset forgets the conversation,
    /system TEXT sets the instructions, /exit ends.

    \b
    weft chat
    weft chat ./Qwen3-0.6B --system "Answer in French." --temperature 0.7
    """
    from weft.serving.cli.chat import converse
    from weft.serving.llm import LLM

    params = _params(sampling)
    with LLM.of(settings.build(EngineConfig)) as llm:
        converse(llm, params, system)
    return 0


@weft.command()
@click.argument(
    "sources", metavar="IN...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="OUT.JSONL",
    type=click.Path(path_type=Path),
    help="file for the answers, a line each",
)
@click.option(
    "--errors",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="file for the lines of rows that failed; else they are in the output, too",
)
@click.option(
    "--state",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="file that says what is done  [default: OUT.JSONL.state]",
)
@click.option(
    "--ordered", is_flag=True, help="write answers in the rows' order, not as they finish"
)
@click.option("--overwrite", is_flag=True, help="replace the output if there is one")
@click.option("--resume", is_flag=True, help="do what an interrupted run has left")
@takes(
    EngineConfig,
    ServerConfig,
    only={
        *(setting.name for setting in settings_of(EngineConfig)),
        *("served_model_name", "tool_parser", "reasoning_parser"),
    },
)
def batch(settings: Settings, **options: Any) -> int:
    """Answer every line of files, each exactly once.

    IN is a JSONL file, a directory (every *.jsonl in it) or - for stdin; several are read one
    after the other. A line is a request of OpenAI's batch format (custom_id, method, url, body),
    or simply {"prompt": "..."} or {"messages": [...]} with sampling fields beside it. A line that
    cannot be answered becomes a line that says why.

    What ends a run, be it kill -9 or a full disk, loses at most the rows of its last second:
    --resume does them again, and leaves alone what is done.

    \b
    weft batch questions.jsonl -o answers.jsonl
    weft batch questions.jsonl -o answers.jsonl --resume
    weft batch monday/ tuesday.jsonl -o answers.jsonl --errors failed.jsonl --ordered
    zcat questions.jsonl.gz | weft batch - -o answers.jsonl
    """
    from weft.serving.cli.batch import run

    return run(settings.build(EngineConfig), settings.build(ServerConfig), **options)


@weft.command("eval")
@click.option(
    "--task", "tasks", multiple=True, metavar="NAME", help="only this; may be given again"
)
@click.option("--count", default=100, metavar="N", help="questions of each task  [default: 100]")
@click.option("--show-failures", default=0, metavar="N", help="show N wrong answers of each task")
@click.option(
    "--fail-under", type=float, metavar="PERCENT", help="exit with 1 if a task scores less"
)
@click.option("--json", "as_json", is_flag=True, help="write the scores to stdout as JSON")
@takes(EngineConfig, model=True)
def evaluate(settings: Settings, **options: Any) -> int:
    """Score MODEL on questions with one right answer.

    They are of the kinds that the bundled models are taught, and not seen in training.

    \b
    weft eval
    weft eval weft-demo-moe --task sorting --count 20 --show-failures 3
    """
    from weft.serving.cli.eval import run

    return run(settings.build(EngineConfig), **options)


@weft.command("compile")
@click.option(
    "--for", "topology", required=True, metavar="SLICE", help="TPU chips, such as v5e:4x4"
)
@click.option("--json", "as_json", is_flag=True, help="write JSON")
@takes(EngineConfig, model=True)
def compile_steps(settings: Settings, topology: str, as_json: bool) -> int:
    """Compile MODEL's steps for TPUs, on any machine.

    Reads config.json alone. Says what a chip's memory holds, and how much of the chips' traffic
    is hidden under products. What is compiled stays in --compile-cache, for `weft serve`.

    \b
    weft compile ./Llama-3.1-8B --for v5e:2x4 --tp 8
    weft compile ./Qwen3-30B-A3B --for v6e:2x4 --tp 8 --ep 8 --max-model-len 8192
    """
    from weft.serving.cli.compile import run

    return run(settings.build(EngineConfig), topology, as_json=as_json)


@weft.command()
@click.option("--json", "as_json", is_flag=True, help="write JSON")
@takes(EngineConfig, ServerConfig)
def config(settings: Settings, as_json: bool) -> int:
    """Show every setting in force, and where its value comes from.

    \b
    weft config
    WEFT_PORT=9000 weft config --config weft.toml --json
    """
    settings.build(EngineConfig)
    settings.build(ServerConfig)
    shown = settings.without_secrets()
    if as_json:
        import json

        print(json.dumps({name: asdict(value) for name, value in shown.items()}, indent=2))
    else:
        for name, value in shown.items():
            print(f"{name:<24} {_shown(value.value):<24} {value.source}")
    return 0


@weft.command()
@click.option("--json", "as_json", is_flag=True, help="write JSON")
@takes(EngineConfig, ServerConfig)
def doctor(settings: Settings, as_json: bool) -> int:
    """Check that this machine can serve.

    Looks at versions, processor, memory, models, GPUs and the port. Exits with 1 if
    something would keep weft from serving.
    """
    from weft.serving.cli.doctor import run

    return run(settings.build(EngineConfig), settings.build(ServerConfig), as_json=as_json)


@weft.command()
@load_options
@click.option(
    "--api-key",
    envvar="OPENAI_API_KEY",
    metavar="KEY",
    help="the server's key; OPENAI_API_KEY gives it too, and keeps it out of `ps`",
)
def bench(**options: Any) -> int:
    """Load an OpenAI-compatible server, and report what its users feel.

    It need not be weft. A table goes to stdout: token and request rates, time to first token
    (TTFT), times between tokens (ITL) and to the end of an answer. Exits with 1 if a request
    failed. docs/benchmarking.md says what each figure means.

    \b
    weft bench
    weft bench --users 1,16,64 --output-tokens 16-256 --target ttft=1,tpot=0.1
    weft bench --rate 1,2,4,8 --plot latency.png --output figures.json
    weft bench --chat --turns 4 --shared-prefix 500 --url http://127.0.0.1:9000/v1
    """
    try:
        from weft.serving.cli.bench.command import main
    except ModuleNotFoundError as error:
        raise ConfigError(f"weft bench needs {error.name}: pip install 'weft[bench]'") from None

    return main(**options)


@weft.group(invoke_without_command=True)
@click.pass_context
def check(context: click.Context) -> int:
    """Check the overlapped kernels, without a GPU or a TPU.

    Needs Triton, or for `tpu` JAX. Exits with 1 if something is found. docs/kernels.md says how
    they work.

    \b
    weft check kernels --world-size 2,3
    weft check aot --target sm_90
    weft check timeline all_gather_matmul -o overlap.svg
    weft check tpu --only all_reduce
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return 0


@check.command("kernels")
@click.option("--only", multiple=True, metavar="OP", help="only this op; may be given again")
@click.option("--world-size", default="1,2,3,4", metavar="N,...", help="ranks  [default: 1,2,3,4]")
@click.option(
    "--seeds", default="3", metavar="N|A-B", help="how many, or from which to which  [default: 3]"
)
@click.option("--json", "as_json", is_flag=True, help="write JSON, with every check's shapes")
def check_kernels(only: tuple[str, ...], world_size: str, seeds: str, as_json: bool) -> int:
    """Run every op on several ranks, against its oracle, and look for races and hangs.

    The ranks take turns in Triton's interpreter, in an order that the seed says, and some of
    them are slow. Shapes and dtype come from the seed, too: what a check finds it finds again.

    \b
    weft check kernels
    weft check kernels --only all_gather_matmul --world-size 8 --seeds 100
    weft check kernels --only all_gather_matmul --world-size 8 --seeds 41-41
    """
    from weft.serving.cli import check

    return check.kernels(only, world_size, seeds, as_json=as_json)


@check.command("aot")
@click.option("--target", multiple=True, metavar="NAME", help="only this; may be given again")
@click.option("--only", multiple=True, metavar="OP", help="only this op; may be given again")
@click.option("--all", "everything", is_flag=True, help="every tile that tuning may choose: hours")
@click.option("--json", "as_json", is_flag=True, help="write JSON, with each kernel's constants")
def check_aot(
    target: tuple[str, ...], only: tuple[str, ...], everything: bool, as_json: bool
) -> int:
    """Compile every kernel for the GPUs that it is for: sm_80, sm_90, sm_100 and gfx942.

    Found are: spilled registers, products that do not use the tensor cores, and signals that may
    be seen before the data that they announce.

    \b
    weft check aot
    weft check aot --target sm_90 --only matmul_reduce_scatter --json
    """
    from weft.serving.cli import check

    return check.aot(target, only, everything=everything, as_json=as_json)


@check.command("timeline")
@click.argument("op", metavar="OP")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="a picture (.svg), or a trace for https://ui.perfetto.dev (.json)",
)
@click.option(
    "--world-size", default=4, type=click.IntRange(1, 16), metavar="N", help="ranks  [default: 4]"
)
def check_timeline(op: str, output: Path, world_size: int) -> int:
    """Draw how OP hides communication: what each rank does, and when it waits.

    Time is virtual: the order and the waits are those of the protocol, the lengths are counts of
    numbers moved.

    \b
    weft check timeline all_gather_matmul -o overlap.svg
    weft check timeline matmul_reduce_scatter --world-size 8 -o overlap.json
    """
    from weft.serving.cli import check

    return check.timeline(op, output, world_size)


@check.command("tpu")
@click.option("--only", multiple=True, metavar="OP", help="only this op; may be given again")
@click.option("--target", multiple=True, metavar="NAME", help="only this; may be given again")
@click.option("--json", "as_json", is_flag=True, help="write JSON")
def check_tpu(only: tuple[str, ...], target: tuple[str, ...], as_json: bool) -> int:
    """Run every TPU op on 2, 4 and 8 interpreted devices, and compile it for real TPUs.

    Interpreted, it is looked at for wrong numbers, races, deadlocks, signals that nobody waits for,
    and other devices touched before they are there. Compiled, by the compiler of v5e:2x4,
    v5p:2x2x1, v6e:2x4 and tpu7x:2x2x1, for what that refuses. docs/tpu.md says more.

    \b
    weft check tpu
    weft check tpu --only all_gather_matmul --target v5e:2x4
    """
    from weft.serving.cli import check

    return check.tpu(only, target, as_json=as_json)


def _params(given: dict[str, Any]) -> SamplingParams:
    from weft.serving.engine.sampling_params import SamplingParams

    try:
        wish = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{"temperature": 0.0} | wish)
    except RequestError as error:
        raise ConfigError(f"a sampling flag: {error}") from None


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)


if __name__ == "__main__":
    main()
