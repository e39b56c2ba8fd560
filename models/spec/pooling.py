"""What an embedding is made of: which hidden states of a prompt, and whether it has unit length.

Checkpoints in the form of sentence-transformers say so: `modules.json` lists what follows the
model, and the folder of its Pooling module has a config.json. Both ways of writing the mode are
read: `pooling_mode_mean_tokens: true`, and `pooling_mode: "mean"` of newer versions.

Not handled: other modules (Dense), other modes (cls, max, weightedmean), and prompts that a
checkpoint would put before a text: these are the caller's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.errors import ModelError

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
        kind: the mean over all tokens, or the last token's.
        normalize: divide it by its length.
    """

    kind: PoolingKind = "last"
    normalize: bool = True

    def finish(self, pooled: bytes, dimensions: int | None = None) -> Float32:
        """An embedding, float32 [dimensions], of pooled hidden states, float32 [hidden].

        With fewer dimensions it is the first of them (Kusupati et al. 2022, Matryoshka
        representation learning), normalized after that.
        """
        import numpy as np  # not with the module: who starts the engine's process reads this

        vector = np.frombuffer(pooled, np.float32)[:dimensions]
        if not self.normalize:
            return vector
        length = float(np.linalg.norm(vector.astype(np.float64)))
        return (vector / max(length, 1e-12)).astype(np.float32)


def read_pooling(path: Path) -> Pooling:
    """How the checkpoint in the directory `path` wants it: without modules.json, the default.

    Raises:
        ModelError: it asks for what is not handled, or a file makes no sense.
    """
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
                    "--pooling mean or last does without"
                )
    if kind is None:
        raise ModelError(f"{file} has no module Pooling; --pooling mean or last sets it")
    return Pooling(kind, normalize)


def _modules(file: Path) -> list[tuple[str, str]]:
    """Name and folder of each module, in their order."""
    try:
        modules = json.loads(file.read_bytes())
        return [(str(m["type"]).rpartition(".")[2], str(m["path"])) for m in modules]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ModelError(f"{file} is no list of modules: {error!r}") from error


def _kind(file: Path) -> PoolingKind:
    """What a Pooling module's config asks for."""
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
            f"{file}: the pooling mode is {mode!r}; supported is {', '.join(_KINDS)}. "
            "--pooling mean or last sets another"
        )
    return _KINDS[mode]
