"""Pooling: how hidden states become an embedding, as the checkpoint configures it.

sentence-transformers checkpoints configure it in two files: `modules.json` lists
the modules after the model, and the folder of the Pooling module has a config.json. Both notations
of the mode are read: the older `pooling_mode_mean_tokens: true`, and the newer `pooling_mode:
"mean"`.

Not handled: other modules (Dense), other modes (cls, max, weightedmean), and prompts that a
checkpoint puts before a text. The caller adds such prompts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.errors import ModelError, shown

if TYPE_CHECKING:
    from weft.models.interface import Float32

PoolingKind = Literal["mean", "last"]

MODULES_FILE = "modules.json"
_KINDS: dict[str, PoolingKind] = {"mean": "mean", "lasttoken": "last"}
_OLD_FIELD = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}


@dataclass(frozen=True, slots=True)
class Pooling:
    """How hidden states after the final norm become an embedding.

    Attributes:
        kind: "mean" over all tokens, or the "last" token.
        normalize: scale the embedding to unit length.
    """

    kind: PoolingKind = "last"
    normalize: bool = True

    def finish(self, pooled: bytes, dimensions: int | None = None) -> Float32:
        """Turn pooled hidden states into an embedding.

        Args:
            pooled: float32 [hidden], as bytes.
            dimensions: keep only the first ones (Kusupati et al. 2022, Matryoshka representation
                learning); normalization comes after the cut.

        Returns:
            float32 [dimensions].
        """
        import numpy as np  # here, because the process that starts the engine needs no NumPy

        vector = np.frombuffer(pooled, np.float32)[:dimensions]
        if not self.normalize:
            return vector
        length = float(np.linalg.norm(vector.astype(np.float64)))
        return (vector / max(length, 1e-12)).astype(np.float32)


def read_pooling(path: Path) -> Pooling:
    """Read the pooling that the checkpoint at `path` asks for; the default without modules.json.

    Raises:
        ModelError: it asks for an unsupported module or mode, or a file is malformed.
    """
    from weft.models.checkpoint.locate import read_spec

    file = path / MODULES_FILE
    if not file.exists():
        return Pooling()
    kind, normalize = None, False
    for name, folder in _modules(file):
        match name:
            case "Transformer":
                pass
            case "Pooling":
                kind = _kind(path / folder / "config.json")
            case "Normalize":
                normalize = True
            case _:
                raise ModelError(
                    f"{file} has a module {name!r}; supported is Transformer, Pooling, Normalize. "
                    "--pooling mean or last ignores the modules"
                )
    if kind is None:
        raise ModelError(f"{file} has no module Pooling; --pooling mean or last sets it")
    if not normalize and read_spec(path).norm.weight.scale != 1.0:
        raise ModelError(
            f"{file} has no module Normalize; it must have one, because the final norm is scaled "
            "by config.json's logits_scaling. --pooling mean or last ignores the modules"
        )
    return Pooling(kind, normalize)


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return name and folder of each module, in order."""
    try:
        modules = json.loads(file.read_bytes())
        return [(str(m["type"]).rpartition(".")[2], str(m["path"])) for m in modules]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ModelError(f"{file} is not a list of modules: {error!r}") from error


def _kind(file: Path) -> PoolingKind:
    """Read the mode from a Pooling module's config."""
    from weft.models.checkpoint.locate import read_json

    config = read_json(file)
    mode: Any = config.get("pooling_mode")
    if mode is None:
        prefix = "pooling_mode_"
        fields = [name.removeprefix(prefix) for name in config if name.startswith(prefix)]
        asked = [field for field in fields if config[prefix + field] is True]
        mode = "+".join(_OLD_FIELD.get(field, field) for field in asked)
    if not isinstance(mode, str) or mode not in _KINDS:
        raise ModelError(
            f"{file}: the pooling mode is {shown(mode)}; supported is {', '.join(_KINDS)}. "
            "--pooling mean or last sets another"
        )
    return _KINDS[mode]
