"""The choice of a rank's device."""

from __future__ import annotations

import pytest
import torch

from weft.errors import ConfigError
from weft.models.torch.device import choose_device


def have(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_auto_takes_a_gpu_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, 4)
    assert choose_device("auto", 3) == torch.device("cuda", 3)
    assert choose_device("cuda", 0) == torch.device("cuda", 0)
    assert choose_device("auto", 4) == torch.device("cpu")
    assert choose_device("cpu", 0) == torch.device("cpu")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 1)
    with pytest.raises(
        ConfigError, match=r"cuda; this machine has 1 GPU, but one of its ranks needs GPU 1"
    ):
        choose_device("cuda", 1)
    have(monkeypatch, 0)
    with pytest.raises(ConfigError, match="--device is cuda; torch finds no GPU"):
        choose_device("cuda", 0)
    assert choose_device("auto", 0) == torch.device("cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"was built without CUDA\. --device cpu needs none"):
        choose_device("cuda", 0)
