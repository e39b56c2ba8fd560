"""Reading ahead: which bytes are asked for, how many at once, and what stays when it ends."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import make_checkpoint

from weft.errors import ModelError
from weft.models.checkpoint import read_ahead
from weft.models.checkpoint.locate import SINGLE_FILE, read_spec
from weft.models.checkpoint.read_ahead import ReadAhead, Span
from weft.models.checkpoint.weights import Weights, read_header
from weft.models.spec.layout import Layout
from weft.models.torch.runner import TorchRunner

THREAD = "weft-read-ahead"


class Asked:
    """The chunks that the thread asked for; wait for a count with `wait`."""

    def __init__(self) -> None:
        self.chunks: list[Span] = []
        self._changed = threading.Condition()

    def __call__(self, chunk: Span) -> None:
        with self._changed:
            self.chunks.append(chunk)
            self._changed.notify_all()

    def wait(self, count: int) -> list[Span]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.chunks) >= count, timeout=60)
            return list(self.chunks)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """Chunks of 10 bytes, 40 bytes ahead."""
    found = Asked()
    monkeypatch.setattr(read_ahead, "_ask", found)
    monkeypatch.setattr(read_ahead, "CHUNK", 10)
    monkeypatch.setattr(read_ahead, "AHEAD", 40)
    yield found
    assert THREAD not in [thread.name for thread in threading.enumerate()]


def span(start: int, stop: int, file: str = "a") -> Span:
    return Span(Path(file), start, stop)


def test_no_more_than_the_limit_is_asked_for(asked: Asked) -> None:
    """Also beyond the end of a file; the thread goes on when the loader does."""
    spans = [span(0, 25), span(25, 60), span(0, 30, "b")]
    ahead = ReadAhead(spans)
    with ahead.running():
        first = asked.wait(4)
        assert first == [span(0, 10), span(10, 20), span(20, 30), span(30, 40)]
        ahead.at(spans[1])  # in the chunk that begins at byte 20
        assert asked.wait(6)[4:] == [span(40, 50), span(50, 60)]
        ahead.at(spans[2])
        rest = asked.wait(9)[6:]
    assert rest == [span(0, 10, "b"), span(10, 20, "b"), span(20, 30, "b")]
    assert asked.chunks == sorted(asked.chunks)


def test_nothing_is_asked_for_twice_or_without_need(asked: Asked) -> None:
    """Parts of other ranks lie between; parts may overlap; the first may be read last."""
    spans = [span(0, 10), span(5, 10), span(50, 60), span(90, 100)]
    ahead = ReadAhead(reversed(spans))
    with ahead.running():
        asked.wait(3)
        for each in (*spans[1:], spans[0]):
            ahead.at(each)
    assert asked.chunks == [span(0, 10), span(50, 60), span(90, 100)]


def test_a_rank_asks_for_its_own_rows(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    spec = read_spec(path)
    gate = next(w for w in spec.weights if w.name.endswith("0.mlp.gate_proj.weight"))
    entry = read_header(path / SINGLE_FILE)[gate.name]
    parts = Layout(tp=2, rank=1).parts(spec, gate)
    half = entry.bytes // 2
    assert entry.spans(parts) == [Span(entry.file, entry.start + half, entry.start + entry.bytes)]
    data = (path / SINGLE_FILE).read_bytes()[entry.start + half : entry.start + entry.bytes]
    own = Weights(path, spec, layout=Layout(tp=2, rank=1)).read(gate)
    assert own.contiguous().view(torch.uint8).numpy().tobytes() == data


@pytest.mark.parametrize(
    ("index", "place"),
    [
        ((slice(0, 4), slice(0, 3), slice(0, 5)), (0, 60)),
        ((slice(1, 3), slice(1, 2), slice(0, 5)), (15, 45)),
        ((2, slice(1, 3), slice(0, 5)), (35, 45)),
        ((2, slice(1, 2), slice(1, 4)), (36, 39)),
        ((2, 1), (35, 40)),
        ((2, slice(1, 1), slice(0, 5)), (35, 35)),
        ((), (0, 60)),
    ],
)
def test_the_bytes_of_a_part(
    index: tuple[int | slice, ...], place: tuple[int, int], tmp_path: Path
) -> None:
    file = tmp_path / SINGLE_FILE
    save_file({"a": torch.arange(60, dtype=torch.uint8).view(4, 3, 5)}, file)
    entry = read_header(file)["a"]
    (found,) = entry.spans(index)
    assert (found.start - entry.start, found.stop - entry.start) == place
    numbers = entry.map()[index].flatten().tolist()
    data = file.read_bytes()[found.start : found.stop]
    assert set(numbers) <= set(data)


def load(path: Path) -> TorchRunner:
    sizes = {"block_size": 8, "max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 8}
    return TorchRunner.load(path, read_spec(path), dtype="auto", **sizes)


def open_files(path: Path) -> list[str]:
    """The files below a path that this process has open."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [name for name in names if name.startswith(str(path))]


def test_loading_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    """Except for the embedding's file, as long as the model reads rows from it."""
    path = make_checkpoint(tmp_path, "llama")
    runner = load(path)
    assert THREAD not in [thread.name for thread in threading.enumerate()]
    assert len(open_files(path)) <= 1
    del runner
    gc.collect()
    assert open_files(path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError("damaged")])
def test_the_thread_ends_with_an_error_of_the_loader(
    error: BaseException | type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of loading, or a damaged tensor."""
    path = make_checkpoint(tmp_path, "llama")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Weights, "_count", fail)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        load(path)
    assert THREAD not in [thread.name for thread in threading.enumerate()]


def test_a_file_that_was_cut_is_named_with_the_tensor(tmp_path: Path) -> None:
    """It was whole when its header was read."""
    path = make_checkpoint(tmp_path, "llama")
    spec = read_spec(path)
    weights = Weights(path, spec)
    file = path / SINGLE_FILE
    entries = read_header(file)
    last = max(entries.values(), key=lambda entry: entry.start)
    os.truncate(file, last.start)
    weight = next(weight for weight in spec.weights if weight.name == last.name)
    with weights.read_ahead(), pytest.raises(ModelError, match="is smaller than the") as raised:
        weights.read(weight)
    assert str(raised.value).startswith(f"{file}: cannot read {last.name}: ")
    file.unlink()
    with weights.read_ahead(), pytest.raises(ModelError, match="No such file") as raised:
        weights.read(weight)
    assert str(raised.value).startswith(f"{file}: cannot read {last.name}: ")
