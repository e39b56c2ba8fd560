"""Which device a rank computes on, and what is free there."""

from __future__ import annotations

import torch

from weft.errors import ConfigError


def choose_device(setting: str, number: int, needed: int) -> torch.device:
    """A rank's device.

    Args:
        setting: "cpu", "cuda", or "auto": GPUs if this machine has one for each of its ranks.
        number: of the rank among those of this machine.
        needed: how many those are.

    Raises:
        ConfigError: "cuda" is asked for, and there are none or too few: naming what is missing.
    """
    if setting == "cpu":
        return torch.device("cpu")
    missing = _missing(needed)
    if not missing:
        return torch.device("cuda", number)
    if setting == "cuda":
        raise ConfigError(f"--device is cuda; {missing}. --device cpu needs none")
    return torch.device("cpu")


def _missing(needed: int) -> str:
    """What GPUs need that is not here; nothing if there are so many."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU: is there one, and does nvidia-smi list it?"
    found = torch.cuda.device_count()
    if found < needed:
        gpus = "1 GPU" if found == 1 else f"{found} GPUs"
        return f"this machine has {gpus}, and {needed} ranks, each of which takes one"
    return ""


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, of all processes that use it."""
    return int(torch.cuda.mem_get_info(device)[0])
