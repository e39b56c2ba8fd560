"""`weft quantize` as its users run it: whole or nothing, and one line for each mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.checkpoints import make_checkpoint
from support.commands import run_each
from support.disks import small_disk

from weft.errors import ConfigError, DiskError
from weft.models.checkpoint.locate import read_spec
from weft.models.checkpoint.weights import Weights
from weft.models.spec.schemes import SCHEMES
from weft.serving.cli import quantize as module
from weft.serving.cli.main import weft
from weft.serving.cli.quantize import run
from weft.serving.config.settings import EngineConfig

TEXT = "the weft weaves the cloth together, and the user asks for the weather. " * 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "m", "llama", dtype="bfloat16")


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model") / "moe", "qwen3_moe", moe_intermediate_size=64
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def config(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path))


def test_a_copy_is_compared_and_loads(
    checkpoint: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    assert run(config(checkpoint), copy, group_size=32, text=text) == 0
    first, perplexity, divergence = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{copy}: W4A16, 200.6 KiB -> ")
    assert perplexity.startswith("perplexity: ")
    assert perplexity.endswith(" tokens")
    assert 0 < float(divergence.split()[2]) < 5
    spec = read_spec(copy)
    Weights(copy, spec)
    assert spec.quantization is not None
    assert spec.quantization.formats == {"packed"}


def test_experts_are_scaled_and_rounded(with_experts: Path, tmp_path: Path, text: Path) -> None:
    plain, scaled = tmp_path / "plain", tmp_path / "scaled"
    run(config(with_experts), plain, group_size=32)
    run(config(with_experts), scaled, group_size=32, method="awq", calibration=text)
    one, other = (Weights(path, read_spec(path)) for path in (plain, scaled))
    layer = read_spec(plain).layers[0]
    assert not all(
        a.equal(b)
        for weight in (layer.attention.o.weight, layer.feed_forward.down)  # type: ignore[union-attr]
        for a, b in zip(one.read_each(weight), other.read_each(weight), strict=True)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("form", SCHEMES)
def test_every_format_has_its_flag(form: str, with_experts: Path, tmp_path: Path) -> None:
    size = 32 if form.startswith("W4") else None
    assert run(config(with_experts), tmp_path / "copy", form=form, group_size=size) == 0
    section = json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]
    assert section["format"].partition("-")[0] in ("pack", "int", "float")


def test_windows_begin_as_the_tokenizer_says(checkpoint: Path) -> None:
    windows = module._windows(checkpoint, TEXT, "--text", 50)
    assert {len(window) for window in windows[:-1]} == {50}
    whole = [token for window in windows for token in window]
    assert whole == module._windows(checkpoint, TEXT, "--text", 10_000)[0]


WRONG = {
    "--format is 'int4'; it must be one of W4A16, W4A16_ASYM, ": ("--format", "int4"),
    "--method is 'gptq'; it must be rtn or awq": ("--method", "gptq"),
    "--method awq needs --calibration": ("--method", "awq"),
    "--method awq needs int4": ("--method", "awq", "--format", "W8A8"),
    "only --method awq reads it": ("--calibration", "text.txt"),
    "--group-size is 48; it must be one of 32, 64, 128": ("--group-size", "48"),
    "--format FP8_BLOCK has no groups": ("--format", "FP8_BLOCK", "--group-size", "32"),
    "--group-size is 128; it must divide": (),
    "--text is none.txt; it cannot be read: No such file": ("--text", "none.txt"),
    "--text has a text of 0 tokens": ("--text", "empty.txt", "--group-size", "32"),
    "--text is latin.txt; it must be UTF-8": ("--text", "latin.txt"),
    "-o is full, which is not empty; name a new directory": ("-o", "full"),
    "-o is text.txt, which is a file": ("-o", "text.txt"),
    "there is no directory": ("-o", "none/copy"),
}


def test_mistakes_are_named_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, text: Path
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    lines = [["quantize", checkpoint, "-o", "copy", *flags] for flags in WRONG.values()]
    for message, done in zip(WRONG, run_each(lines, tmp_path), strict=True):
        assert message in done.stderr
        assert (done.returncode, done.stdout) == (2, "")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_quantized_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    run(config(checkpoint), tmp_path / "copy", form="FP8_DYNAMIC")
    arguments = ["quantize", tmp_path / "copy", "-o", "again", "--group-size", "32"]
    (done,) = run_each([arguments], tmp_path)
    assert done.returncode == 1
    assert "the model is quantized already" in done.stderr
    assert not (tmp_path / "again").exists()


def test_an_empty_directory_is_filled(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    run(config(checkpoint), tmp_path / "copy", form="W8A8")
    assert (tmp_path / "copy" / "config.json").exists()


def test_a_full_disk_is_named_and_nothing_is_left(checkpoint: Path) -> None:
    with small_disk(64 * 1024) as disk:
        with pytest.raises(DiskError, match=rf"cannot write {disk}/.*[Nn]o space left"):
            run(config(checkpoint), disk / "copy", form="W8A8")
        assert list(disk.iterdir()) == []


def test_an_unwritable_directory_is_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.serving.cli.files.os.access", lambda *_: False)  # root may write
    with pytest.raises(ConfigError, match=f"-o is {tmp_path}/copy; {tmp_path} is not writable"):
        run(config(checkpoint), tmp_path / "copy", form="W8A8")


STUCK = """
import sys, time
from weft.models.checkpoint import quantized_copy
from weft.serving.cli.main import main
write = quantized_copy._write_small_files
def stuck(*arguments):
    write(*arguments)
    print("written", flush=True)
    time.sleep(600)
quantized_copy._write_small_files = stuck
sys.argv = ["weft", *sys.argv[1:]]
main()
"""


def killed(checkpoint: Path, folder: Path, number: int) -> int:
    """Send a signal to a command that has written everything, but has not renamed the folder."""
    arguments = ["quantize", str(checkpoint), "-o", "copy", "--format", "W8A8"]
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "written\n"
        process.send_signal(number)
        return process.wait(60)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)]
)
def test_nothing_is_left_by_a_stopped_command(
    number: int, status: int, checkpoint: Path, tmp_path: Path
) -> None:
    assert killed(checkpoint, tmp_path, number) == status
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_command_left_is_removed_by_the_next(
    checkpoint: Path, tmp_path: Path
) -> None:
    assert killed(checkpoint, tmp_path, signal.SIGKILL) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".copy.")
    run(config(checkpoint), tmp_path / "copy", form="W8A8")
    assert [each.name for each in tmp_path.iterdir()] == ["copy"]


def test_a_running_command_keeps_its_folder(checkpoint: Path, tmp_path: Path) -> None:
    """Another command with the same name for its copy does not remove it."""
    from weft.serving.cli.files import whole_folder

    with whole_folder(tmp_path / "copy") as first:
        (first / "file").touch()
        other = tmp_path / ".copy.1.partial"
        other.mkdir()
        script = "from pathlib import Path; from weft.serving.cli.files import whole_folder\n"
        script += "with whole_folder(Path('copy')) as folder: (folder / 'mine').touch()"
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
        assert not other.exists()
        assert (first / "file").exists()
        (tmp_path / "copy" / "mine").unlink()
    assert [each.name for each in (tmp_path / "copy").iterdir()] == ["file"]


def test_help_names_the_formats() -> None:
    result = CliRunner().invoke(weft, ["quantize", "--help"])
    assert all(name in result.output for name in SCHEMES)
