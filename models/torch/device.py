"""Which device a rank computes on, and what is free there."""

from __future__ import annotations

import torch

from weft.errors import ConfigError


def choose_device(setting: str, index: int) -> torch.device:
    """A rank's device.

    Args:
        setting: "cpu", "cuda", or "auto": a GPU if there is one with that index. Where there are
            several ranks it has been decided for all of them (serving/executor/placement.py).
        index: of the rank's device, on its machine.

    Raises:
        ConfigError: "cuda" is asked for, and is not there: naming what is missing.
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
    """What a GPU needs that is not here; nothing if it is."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU: is there one, and does nvidia-smi list it?"
    found = torch.cuda.device_count()
    if index >= found:
        gpus = "1 GPU" if found == 1 else f"{found} GPUs"
        return f"this machine has {gpus}, and a rank of it is to have number {index}"
    return ""


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, of all processes that use it."""
    return int(torch.cuda.mem_get_info(device)[0])
