"""A rank's compute device, and its free memory."""

from __future__ import annotations

import torch

from weft.errors import ConfigError


def choose_device(setting: str, index: int) -> torch.device:
    """Choose a rank's device.

    Args:
        setting: "cpu", "cuda", or "auto": a GPU if there is one with that index. With several
            ranks, placement has already decided for all (serving/executor/placement.py).
        index: index of the rank's device on its node.

    Raises:
        ConfigError: "cuda" is set, but something is missing; it says what.
    """
    if setting == "cpu":
        return torch.device("cpu")
    missing = _missing(index)
    if not missing:
        return torch.device("cuda", index)
    if setting == "cuda":
        raise ConfigError(f"--device is cuda; {missing}. --device cpu needs none")
    return torch.device("cpu")


def _missing(index: int) -> str:
    """Name what a GPU still needs; empty if nothing is missing."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU: is there one, and does nvidia-smi list it?"
    found = torch.cuda.device_count()
    if index >= found:
        gpus = "1 GPU" if found == 1 else f"{found} GPUs"
        return f"this machine has {gpus}, but one of its ranks needs GPU {index}"
    return ""


def gpu_name(device: torch.device) -> str | None:
    """Return a GPU's name, as its driver reports it; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def gpu_target(device: torch.device) -> str:
    """Return a GPU's target, such as "sm_90"."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def free_memory(device: torch.device) -> int:
    """Return a GPU's free bytes, over all processes that use it."""
    return int(torch.cuda.mem_get_info(device)[0])
