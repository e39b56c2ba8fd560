"""Copies to a GPU through two buffers, on a device whose copies come as late as they may."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint
from torch import Tensor

from weft.models.checkpoint.locate import read_spec
from weft.models.checkpoint.weights import Weights
from weft.models.torch import staging
from weft.models.torch.gpu_layers import WeightLoader
from weft.models.torch.staging import Buffer, Staging

CPU = torch.device("cpu")


class LateBuffer(Buffer):
    """The device reads a buffer only when somebody waits for it."""

    made: list[LateBuffer]

    def __init__(self, size: int, *, is_pinned: bool) -> None:
        super().__init__(size, is_pinned=is_pinned)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self.made.append(self)

    def send(self, piece: Tensor, place: Tensor) -> None:
        host = self.memory[: piece.nbytes].view(piece.dtype).view(piece.shape)
        host.copy_(piece)
        self._pending.append((place, host))

    def wait(self) -> None:
        for place, host in self._pending:
            place.copy_(host)
        self._pending.clear()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[LateBuffer]:
    """Buffers of 64 bytes."""
    monkeypatch.setattr(LateBuffer, "made", [], raising=False)
    monkeypatch.setattr(staging, "STAGE_BYTES", 64)
    monkeypatch.setattr(staging, "Buffer", LateBuffer)
    return LateBuffer


def finish(late: type[LateBuffer]) -> None:
    for buffer in late.made:
        buffer.wait()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7.0),
        torch.arange(200.0),
        torch.tensor(3.5),
        torch.randn(13, 5),
        torch.randn(13, 10)[:, 2:7],
        torch.randn(5, 13).mT,
        torch.randn(3, 40),  # rows larger than a buffer
        torch.randn(9, 3, 4).bfloat16(),
        torch.randint(255, (50, 3), dtype=torch.uint8),
        torch.randn(8, 8).to(torch.float8_e4m3fn),
        torch.empty(0, 4),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}",
)
def test_a_copy_equals_its_source(tensor: Tensor, late: type[LateBuffer]) -> None:
    stage = Staging(CPU)
    first, second = stage.copy(tensor), stage.copy(tensor)
    finish(late)
    for copy in (first, second):
        assert copy.shape == tensor.shape
        assert copy.dtype == tensor.dtype
        assert copy.flatten().tolist() == tensor.flatten().tolist()


def test_memory_is_two_buffers(late: type[LateBuffer]) -> None:
    """A few bytes for any number of tensors."""
    stage = Staging(CPU)
    for _ in range(9):
        stage.copy(torch.randn(50, 4))
    assert [buffer.size for buffer in late.made] == [64, 64]


def test_the_loader_stages_weights(tmp_path: Path, late: type[LateBuffer]) -> None:
    path = make_checkpoint(tmp_path, "llama")
    spec = read_spec(path)
    weights = Weights(path, spec)
    load = WeightLoader(weights, torch.float32, CPU)
    load._staging = Staging(CPU)
    gate = next(weight for weight in spec.weights if "gate_proj" in weight.name)
    copy = load(gate)
    finish(late)
    assert copy.equal(weights.read(gate))
