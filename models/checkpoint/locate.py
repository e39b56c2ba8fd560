"""Finds a checkpoint and reads its config.json.

Only JSON is read here: no tensors and no code. `auto_map` in a config.json names Python files in
the checkpoint; it is ignored.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from weft.errors import ModelError
from weft.models.spec.families import build_spec
from weft.models.spec.spec import ModelSpec

BUNDLED = ("weft-demo", "weft-demo-moe")


def locate(model: str) -> Path:
    """Return the checkpoint's directory.

    Args:
        model: the name of a bundled model (see `BUNDLED`), or a path to a directory. Write ./NAME
            for a directory with the name of a bundled model.

    Raises:
        ModelError: there is no such directory.
    """
    bundled = Path(__file__).parent.parent / "bundled" / model
    path = bundled if model in BUNDLED else Path(os.path.expanduser(model))
    if not path.is_dir():
        raise ModelError(
            f"no checkpoint at {path}: give a directory with config.json and safetensors files, "
            f"or a bundled model ({', '.join(BUNDLED)})"
        )
    return path


def read_spec(path: Path) -> ModelSpec:
    """Describe the model in the directory `path`, from its config.json.

    Raises:
        ModelError: config.json cannot be read, or the model is not supported.
    """
    return build_spec(read_json(path / "config.json"), path / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        ModelError: the file is missing or holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content
