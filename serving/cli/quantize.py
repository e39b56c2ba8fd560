"""`weft quantize`: a model's quantised copy, as the package compressed-tensors stores it.

The copy is written into a temporary folder, which is renamed at the end. With a text, the original
and the copy then predict its tokens on this machine's CPU, and the command prints how far they
differ. Activations are not rounded there, even if the copy's format asks servers for it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from weft.errors import ConfigError
from weft.models.spec.schemes import GROUP_SIZES, SCHEMES, Scheme
from weft.serving.cli.files import check_folder, whole_folder
from weft.serving.cli.options import TopicCommand, takes
from weft.serving.config.progress import Progress
from weft.serving.config.settings import EngineConfig
from weft.serving.config.sources import Settings

if TYPE_CHECKING:
    from weft.models.checkpoint.quantized_copy import Edit
    from weft.models.spec.spec import ModelSpec
    from weft.models.torch.compare import Comparison

SETTINGS = {"model", "revision"}
WINDOW = 2048
"""Most tokens in a window of --text."""
CALIBRATION_WINDOW, CALIBRATION_WINDOWS = 512, 32
"""Tokens in a window of --calibration, and the most windows that are read."""
FILE = click.Path(path_type=Path)


@click.command("quantize", cls=TopicCommand)
@click.option(
    *("-o", "--output", "output"),
    required=True,
    metavar="DIR",
    type=FILE,
    help="new directory for the copy",
)
@click.option(
    "--format",
    "form",
    default="W4A16",
    metavar="|".join(SCHEMES),
    help="by compressed-tensors' names  [default: W4A16]",
)
@click.option(
    "--group-size",
    type=int,
    metavar="N",
    help="columns that share a scale: 32, 64 or 128; W4A16 and W4A16_ASYM have 128, and W8A16 has "
    "one scale for each row",
)
@click.option(
    "--method",
    default="rtn",
    metavar="rtn|awq",
    help="round to nearest, or scale columns by their inputs first (AWQ)  [default: rtn]",
)
@click.option(
    "--calibration", metavar="FILE", type=FILE, help="text for --method awq, like that of your use"
)
@click.option(
    "--text",
    metavar="FILE",
    type=FILE,
    help="compare the copy with the original on this text: perplexity, KL divergence",
)
@takes(EngineConfig, model=True, only=SETTINGS)
def quantize(
    settings: Settings,
    output: Path,
    form: str,
    group_size: int | None,
    method: str,
    calibration: Path | None,
    text: Path | None,
) -> int:
    """Write a quantized copy of MODEL.

    weft, vLLM and transformers load the copy without flags: its form is compressed-tensors'.
    Matrices of attention, MLPs and experts are quantized. Embedding, LM head, routers, norms and
    biases stay as they are.

    \b
    weft quantize Qwen/Qwen3-8B -o Qwen3-8B-W4A16
    weft quantize Qwen/Qwen3-8B -o Qwen3-8B-FP8 --format FP8_DYNAMIC --text wiki.txt
    weft quantize Qwen/Qwen3-8B -o Qwen3-8B-AWQ --method awq --calibration mine.txt
    weft quantize weft-demo -o demo-w4 --group-size 64
    """
    return run(
        settings.build(EngineConfig),
        output,
        form=form,
        group_size=group_size,
        method=method,
        calibration=calibration,
        text=text,
    )


def run(
    config: EngineConfig,
    output: Path,
    *,
    form: str = "W4A16",
    group_size: int | None = None,
    method: str = "rtn",
    calibration: Path | None = None,
    text: Path | None = None,
) -> int:
    """Write the copy, and print its size and, with a text, how far it differs.

    Raises:
        ConfigError: a flag is wrong, or a group's size does not fit a matrix.
        ModelError: the model is quantised already, damaged or not supported.
        DiskError: the copy cannot be written.
    """
    _check_flags(form, method, calibration)
    check_folder(output, "-o")
    texts = {flag: _read(path, flag) for flag, path in _named(calibration, text) if path}
    from weft.models.checkpoint.locate import locate, read_spec
    from weft.models.checkpoint.quantized_copy import check_sizes, check_source, write_copy
    from weft.models.checkpoint.weights import Weights
    from weft.models.memory.ledger import human_bytes
    from weft.serving.executor.fetch import fetch
    from weft.serving.executor.loading import show_progress

    scheme = SCHEMES[form]
    if group_size is not None:
        if not scheme.takes_groups:
            raise ConfigError(f"--group-size is {group_size}; --format {form} has no groups")
        if group_size not in GROUP_SIZES:
            known = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"--group-size is {group_size}; it must be one of {known}")
        scheme = scheme.with_groups(group_size)
    config = asyncio.run(fetch(config))
    path = locate(config.model, config.revision)
    spec = read_spec(path)
    check_source(path, spec)
    check_sizes(scheme, spec, Weights(path, spec))
    windows = {
        flag: _windows(path, content, flag, min(size, spec.max_model_len))
        for flag, content in texts.items()
        for size in [CALIBRATION_WINDOW if flag == "--calibration" else WINDOW]
    }
    with whole_folder(output) as folder:
        edits: dict[str, list[Edit]] = {}
        if method == "awq":
            edits = _find_edits(path, spec, scheme, windows["--calibration"][:CALIBRATION_WINDOWS])
        with show_progress("quantize") as progress:
            sizes = write_copy(path, spec, folder, scheme, edits=edits, progress=progress)
    before, after = human_bytes(sizes.before), human_bytes(sizes.after)
    print(f"{output}: {form}, {before} -> {after}", flush=True)
    if text is not None:
        print(_report(_compare(path, output, windows["--text"])))
    return 0


def _check_flags(form: str, method: str, calibration: Path | None) -> None:
    """Refuse unknown names, and flags that do not fit together."""
    if form not in SCHEMES:
        raise ConfigError(f"--format is {form!r}; it must be one of {', '.join(SCHEMES)}")
    if method not in ("rtn", "awq"):
        raise ConfigError(f"--method is {method!r}; it must be rtn or awq")
    if method == "awq" and not form.startswith("W4"):
        raise ConfigError(f"--method awq needs int4: --format W4A16 or W4A16_ASYM, not {form}")
    if method == "awq" and calibration is None:
        raise ConfigError("--method awq needs --calibration, a file with text")
    if method != "awq" and calibration is not None:
        raise ConfigError(f"--calibration is {calibration}; only --method awq reads it")


def _named(calibration: Path | None, text: Path | None) -> list[tuple[str, Path | None]]:
    return [("--calibration", calibration), ("--text", text)]


def _read(path: Path, flag: str) -> str:
    """Read a text.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} is {path}; it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} is {path}; it must be UTF-8: {error}") from error


def _windows(path: Path, text: str, flag: str, size: int) -> list[list[int]]:
    """Cut a text into windows of at most `size` tokens; each begins as the tokenizer says.

    Raises:
        ConfigError: it has fewer than two tokens.
    """
    from weft.serving.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    start = tokenizer.encode("")[: size - 1]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) < 2:
        raise ConfigError(f"{flag} has a text of {len(tokens)} tokens; it must have at least 2")
    step = size - len(start)
    return [start + tokens[i : i + step] for i in range(0, len(tokens), step)]


def _find_edits(
    path: Path, spec: ModelSpec, scheme: Scheme, windows: list[list[int]]
) -> dict[str, list[Edit]]:
    from weft.models.torch.awq import find_edits

    with Progress("calibrate", len(spec.layers), unit="layers") as shown:
        return find_edits(
            path, spec.for_context(CALIBRATION_WINDOW), scheme, windows, shown.advance
        )


def _compare(path: Path, copy: Path, windows: list[list[int]]) -> Comparison:
    from weft.models.torch.compare import compare

    with Progress("compare", 2 * len(windows), unit="windows") as shown:
        return compare(path, copy, windows, shown.advance)


def _report(of: Comparison) -> str:
    change = of.after / of.before - 1
    return (
        f"perplexity: {of.before:.4f} -> {of.after:.4f} ({change:+.2%}), over {of.tokens:,} "
        f"tokens\nKL divergence: {of.divergence:.5f} nats per token"
    )
