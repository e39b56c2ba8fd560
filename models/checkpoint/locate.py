"""Finds a checkpoint on this machine, and reads its config.json.

A model is named by a bundled model's name, a directory, a GGUF file, an id on the Hugging Face hub,
or a URL with s3:// or gs://. An id and a URL are looked up in a cache; download.py fills the cache.
A GGUF file's path stands for a directory's: `read_config` and `find_files` know both.

Only JSON and GGUF headers are read here: no tensors and no code. `auto_map` in a config.json names
Python files in the checkpoint; it is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, ModelError
from weft.models.checkpoint.gguf_header import PART, SUFFIX, check_gguf, is_gguf, read_header
from weft.models.checkpoint.gguf_model import gguf_config
from weft.models.spec.build import build_spec
from weft.models.spec.spec import ModelSpec

BUNDLED = ("weft-demo", "weft-demo-moe")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
OTHER_WEIGHTS = (
    (
        "adapter_model.*",
        "an adapter without its model",
        "merge it into the model with peft (merge_and_unload) and save that",
    ),
    ("model-*-of-*.safetensors", "which only an index joins", f"get {INDEX_FILE}, too"),
    ("*.gguf", "in llama.cpp's format", "give the path of one such file as the model"),
    (
        "pytorch_model*.bin",
        "pickled, which can run code",
        "convert it once with transformers: "
        "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)",
    ),
    (
        "*.safetensors",
        "under another name",
        f"if that is the whole model, rename it to {SINGLE_FILE}",
    ),
)
"""Weights that are not read: their names, what they are, and what to do."""

COMPLETE = ".complete"
"""Empty file in a copy of a bucket's folder; it is there once all files are."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_FOLDER = re.compile(r"models--(.+?)--(.+)")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub.

    Attributes:
        id: OWNER/NAME.
        revision: a branch, a tag or a commit.
        by_url: the user gave a URL with hf://; it names no directory.
    """

    id: str
    revision: str = "main"
    by_url: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return self.id if self.revision == "main" else f"{self.id} at {self.revision}"

    @property
    def cache(self) -> Path:
        """The model's folder in the hub's cache (HF_HUB_CACHE, or HF_HOME/hub)."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{self.id.replace('/', '--')}"

    @property
    def commit(self) -> str | None:
        """The revision's commit; None if the cache does not know it."""
        if _COMMIT.fullmatch(self.revision):
            return self.revision
        try:
            return (self.cache / "refs" / self.revision).read_text().strip() or None
        except OSError:
            return None

    @property
    def snapshot(self) -> Path | None:
        """The commit's directory in the cache, if it exists."""
        commit = self.commit
        path = self.cache / "snapshots" / (commit or "")
        return path if commit and path.is_dir() else None


@dataclass(frozen=True, slots=True)
class Bucket:
    """A model in object storage.

    Attributes:
        url: such as s3://bucket/models/Qwen3-0.6B, without a slash at its end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def scheme(self) -> str:
        """s3 or gs."""
        return self.url.partition(":")[0]

    @property
    def copy(self) -> Path:
        """The directory for this machine's copy: below XDG_CACHE_HOME, or ~/.cache."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        digest = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        return cache / "weft" / "models" / f"{self.url.rpartition('/')[2]}-{digest}"

    @property
    def is_complete(self) -> bool:
        """True if the copy has all files."""
        return (self.copy / COMPLETE).exists()


def remote(model: str, revision: str | None = None) -> HubModel | Bucket | None:
    """Tell where a model comes from; None for a directory, a GGUF file or a bundled model.

    Args:
        model: the model, as a user names it. A directory with the same name as a hub id comes
            first.
        revision: a branch, tag or commit for a hub id.

    Raises:
        ConfigError: `revision` is given for something else than a hub id, or twice.
    """
    name, is_url = model, "://" in model
    scheme = model.partition("://")[0]
    if is_url and scheme not in ("hf", "s3", "gs"):
        raise ConfigError(f"--model is {model}; a URL must begin with hf://, s3:// or gs://")
    if scheme in ("s3", "gs") and is_url:
        if revision is not None:
            raise ConfigError(f"--revision is {revision}; {scheme}:// has no revisions")
        return Bucket(model.rstrip("/"))
    if is_url:
        name, _, inside = model.removeprefix("hf://").rstrip("/").partition("@")
        if inside and revision is not None and inside != revision:
            raise ConfigError(f"--revision is {revision}; --model {model} names another one")
        revision = revision or inside or None
        if not _HUB_ID.fullmatch(name):
            raise ConfigError(f"--model is {model}; it must be hf://OWNER/NAME")
    if not is_url and (model in BUNDLED or _directory(model).exists()):
        if revision is not None:
            kind = "GGUF file" if is_gguf(_directory(model)) else "directory"
            raise ConfigError(f"--revision is {revision}; {model} is a {kind} on this machine")
        return None
    if not _HUB_ID.fullmatch(name) or (name.endswith(SUFFIX) and not is_url):
        return None
    return HubModel(name, revision or "main", is_url)


def is_like_a_model(text: str) -> bool:
    """Tell whether a text has the form of a hub id or of a URL, or names a local checkpoint."""
    return (
        text in BUNDLED
        or _HUB_ID.fullmatch(text) is not None
        or (text.startswith(("hf://", "s3://", "gs://")) and not re.search(r"\s", text))
        or os.path.isfile(os.path.join(os.path.expanduser(text), "config.json"))
        or (text.endswith(SUFFIX) and os.path.isfile(os.path.expanduser(text)))
    )


def locate(model: str, revision: str | None = None) -> Path:
    """Return the checkpoint's directory, or GGUF file, on this machine.

    Args:
        model: a bundled model's name (see `BUNDLED`), a directory, a GGUF file, OWNER/NAME on the
            hub, or a URL. Write ./NAME for a directory with a bundled model's name.
        revision: a branch, tag or commit for a hub id.

    Raises:
        ConfigError: `model` and `revision` do not fit together.
        ModelError: there is no such directory, or it holds no checkpoint, or the model has not been
            downloaded.
    """
    path = find(model, revision)
    if not is_gguf(path) and not (path / "config.json").is_file():
        raise ModelError(_what_is_wrong(path))
    return path


def find(model: str, revision: str | None = None) -> Path:
    """Return a model's or tokenizer's path without checking its content; see `locate`."""
    source = remote(model, revision)
    match source:
        case HubModel():
            path = source.snapshot
        case Bucket():
            path = source.copy if source.copy.is_dir() else None
        case None:
            path = _directory(model)
    if path is None:
        raise ModelError(f"{source} is not on this machine: `weft serve {model}` downloads it")
    return path


def is_complete(path: Path) -> bool:
    """Return whether a directory in the hub's cache holds config.json and all weights."""
    if not (path / "config.json").is_file():
        return False
    if (path / SINGLE_FILE).is_file():
        return True
    if not (path / INDEX_FILE).is_file():
        return False
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else []
    return all((path / str(name)).is_file() for name in names)


def find_files(path: Path) -> list[Path]:
    """List a checkpoint's files with weights: safetensors, by the index if there is one, or GGUF.

    Raises:
        ModelError: no file exists, one is missing, the index is malformed, the package `gguf` for a
            GGUF file is missing, or such a file is damaged.
    """
    if is_gguf(path):
        check_gguf()
        return list(read_header(path).files)
    if (path / SINGLE_FILE).exists():
        return [path / SINGLE_FILE]
    index = path / INDEX_FILE
    if not index.exists():
        raise ModelError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}{_what_is_there(path)}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is not a file beside it")
        if not (path / name).exists():
            raise ModelError(f"{path / name} is missing; {INDEX_FILE} names it")
    return [path / name for name in names]


def _what_is_there(path: Path) -> str:
    """Name the other weights in a directory, with advice."""
    for name in (SINGLE_FILE, INDEX_FILE):
        if (path / name).is_symlink():
            return (
                f": {name} is a link to {(path / name).readlink()}, which does not exist; "
                "download the model again"
            )
    return other_weights(file.name for file in path.iterdir())


def other_weights(names: Iterable[str]) -> str:
    """Name the unsupported weights among file names, with advice.

    Empty if there are supported weights.
    """
    names = sorted(names)
    if SINGLE_FILE in names or INDEX_FILE in names:
        return ""
    for pattern, kind, remedy in OTHER_WEIGHTS:
        if found := [name for name in names if fnmatch(name, pattern)]:
            shown = ", ".join(found[:3]) + (" and others" if len(found) > 3 else "")
            return f"; it has {shown}, {kind}: {remedy}"
    return ""


def model_name(model: str) -> str:
    """Return a model's name for the API: the hub id, or the last part of the path.

    A snapshot in the hub's cache has its model's name, not its commit's. A GGUF file's name lacks
    its suffix, and a split one's number.
    """
    source = remote(model)
    if isinstance(source, HubModel):
        return source.id
    if isinstance(source, Bucket):
        return source.url.rpartition("/")[2]
    path = Path(os.path.abspath(os.path.expanduser(model)))
    if path.parent.name == "snapshots" and (cached := _HUB_FOLDER.fullmatch(path.parts[-3])):
        return f"{cached[1]}/{cached[2]}"
    # A GGUF file in the hub's cache is a link to a file whose name is a hash.
    return PART.sub("", path.stem) if is_gguf(path) else path.resolve().name


def read_spec(path: Path) -> ModelSpec:
    """Describe the model at `path`, from its config.json or its GGUF metadata.

    Raises:
        ModelError: config.json or the file cannot be read, or the model is not supported.
    """
    return build_spec(read_config(path), config_file(path))


def config_file(path: Path) -> Path:
    """Return the file that describes the model at `path`: config.json, or the GGUF file itself."""
    return path if is_gguf(path) else path / "config.json"


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json, or its fields from a GGUF file.

    Raises:
        ModelError: it cannot be read, or the GGUF file is not supported.
    """
    return gguf_config(path) if is_gguf(path) else read_json(config_file(path))


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


def _directory(model: str) -> Path:
    if model in BUNDLED:
        return Path(__file__).parent.parent / "bundled" / model
    return Path(os.path.expanduser(model))


def _what_is_wrong(path: Path) -> str:
    """Describe a path without a config.json, and the right argument."""
    if not path.exists():
        return (
            f"no checkpoint at {path}: give a directory with config.json and safetensors files, "
            "a GGUF file, a model on the hub (OWNER/NAME), or a bundled model "
            f"({', '.join(BUNDLED)})"
        )
    if not path.is_dir():
        return (
            f"{path} is a file: give the directory with config.json and the weights, or a GGUF "
            f"file whose name ends in {SUFFIX}"
        )
    link = path / "config.json"
    if link.is_symlink():
        return (
            f"{link} is a link to {link.readlink()}, which does not exist; download the model again"
        )
    if cached := _HUB_FOLDER.fullmatch(path.name):
        snapshots = sorted(each.name for each in path.glob("snapshots/*"))
        advice = f"give {cached[1]}/{cached[2]}"
        if snapshots:
            advice += f", or the directory {path}/snapshots/{snapshots[-1]}"
        return f"{path} is a folder of the hub's cache, not a checkpoint: {advice}"
    folders = (_HUB_FOLDER.fullmatch(each.name) for each in path.iterdir())
    if models := sorted(f"{found[1]}/{found[2]}" for found in folders if found):
        return f"{path} is the hub's cache, not a checkpoint: give one of {', '.join(models[:5])}"
    names = sorted(each.name for each in path.iterdir())
    if not names:
        return f"{path} is empty: give a directory with config.json and safetensors files"
    if other := other_weights(names):
        return f"{path} has no config.json{other}"
    return f"{path} has no config.json: give the directory that save_pretrained wrote"
