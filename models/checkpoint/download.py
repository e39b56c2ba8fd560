"""Downloads checkpoints into a cache: from the Hugging Face hub, or from object storage.

weft fetches only the files that it reads. config.json comes first, so that an unsupported model is
refused before its weights come. An interrupted download continues at the same place. If two
processes need a file, one downloads while the other waits. Files from the hub are compared with
their hash.

huggingface_hub does the transfer from the hub, with its own variables: HF_HOME, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE. fsspec does it for s3:// and gs://.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from weft.errors import ModelError
from weft.models.checkpoint.locate import (
    COMPLETE,
    INDEX_FILE,
    SINGLE_FILE,
    Bucket,
    HubModel,
    is_complete,
    other_weights,
    read_json,
    read_spec,
)
from weft.models.memory.ledger import human_bytes

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Progress = Callable[[int, int], None]
"""Callback with the bytes that are here, and all bytes."""

SMALL_FILES = ("*.json", "*.jinja", "*_Pooling/config.json", "additional_chat_templates/*.jinja")
"""Patterns of the files besides the weights; * stands for no slash."""

WORKERS = 4
"""Files that are fetched at the same time."""

BLOCK = 16 * 2**20
"""Bytes that are read at once."""

TRIES = 5
"""How often a read from object storage is tried while no byte comes."""

DRIVERS = {"s3": ("s3fs", "botocore.exceptions"), "gs": ("gcsfs", "google.auth.exceptions")}
"""fsspec's package for each scheme, and the module with its errors."""

DRIVER_ERRORS = {
    "s3": ("botocore.exceptions.BotoCoreError",),
    "gs": ("gcsfs.retry.HttpError", "google.auth.exceptions.GoogleAuthError"),
}
"""Errors that are no OSError, for each scheme."""


def download(source: HubModel | Bucket, progress: Progress, *, weights: bool = True) -> str | None:
    """Fetch a model, if it is not in the cache.

    Args:
        source: where the model comes from.
        progress: called from several threads.
        weights: fetch the weights, too; otherwise only the small files.

    Returns:
        The commit, for a model on the hub; None for object storage.

    Raises:
        ModelError: the model does not exist, needs a token, cannot be reached, is damaged, does
            not fit on the disk, or is not supported.
    """
    if isinstance(source, Bucket):
        _from_bucket(source, progress, weights)
        return None
    snapshot = source.snapshot
    if snapshot is not None and (is_complete(snapshot) or not weights):
        return source.commit
    return _from_hub(source, progress, weights)


@dataclass(frozen=True, slots=True)
class _File:
    """A file to fetch. The hub has a SHA-256 for large files, and git's hash for the others."""

    name: str
    size: int
    sha256: str | None = None
    git_hash: str | None = None


class _Counter:
    """Byte count for all files together, from several threads."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()
        progress(0, total)

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress(min(self._done, self._total), self._total)


# The hub.


def _from_hub(source: HubModel, progress: Progress, weights: bool) -> str:
    from huggingface_hub import HfApi

    # Its warnings about retries would break the progress bar; the last error is raised.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    api = HfApi(library_name="weft")
    with _hub_errors(source, api):
        info = api.model_info(source.id, revision=source.revision, files_metadata=True)
        pinned = HubModel(source.id, str(info.sha))
        files = {
            each.rfilename: _File(
                each.rfilename,
                each.size or 0,
                each.lfs.sha256 if each.lfs else None,
                each.blob_id,
            )
            for each in info.siblings or ()
        }
        needed = _needed(source, files, lambda file: _fetch(pinned, file, None), weights)
        blobs = source.cache / "blobs"
        _check_space(source, source.cache, needed, (blobs / f"{file.sha256}" for file in needed))
        counter = _Counter(sum(file.size for file in needed), progress)
        pool = ThreadPoolExecutor(WORKERS)
        try:
            # The small files come first: `is_complete` only looks for the weights.
            for small in (True, False):
                files_now = [file for file in needed if _is_small(file.name) is small]
                for task in [pool.submit(_fetch, pinned, file, counter) for file in files_now]:
                    task.result()
        finally:  # after an error, other files may still be on their way
            pool.shutdown(wait=False, cancel_futures=True)
    if source.revision != pinned.revision:
        reference = source.cache / "refs" / source.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(pinned.revision)
    return pinned.revision


def _needed(
    source: HubModel | Bucket,
    files: Mapping[str, _File],
    fetch: Callable[[_File], Path],
    weights: bool,
) -> list[_File]:
    """Choose the files to fetch; raises ModelError if weft cannot load the model.

    Args:
        source: where the model comes from.
        files: all the model's files, by name.
        fetch: fetches one file at once.
        weights: choose the weights, too.
    """
    needed = [file for name, file in files.items() if _is_small(name)]
    if not weights:
        return needed
    other = other_weights(name for name in files if "/" not in name)
    if "config.json" not in files:
        raise ModelError(f"{source} has no config.json{other}")
    read_spec(fetch(files["config.json"]).parent)
    if SINGLE_FILE in files:
        return [*needed, files[SINGLE_FILE]]
    if INDEX_FILE not in files:
        raise ModelError(f"{source} has neither {SINGLE_FILE} nor {INDEX_FILE}{other}")
    weight_map = read_json(fetch(files[INDEX_FILE])).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{source}: {INDEX_FILE} has no weight_map")
    shards = sorted({str(name) for name in weight_map.values()})
    if elsewhere := [name for name in shards if "/" in name]:
        raise ModelError(
            f"{source}: {INDEX_FILE} names {elsewhere[0]!r}, which is not a file beside it"
        )
    if missing := [name for name in shards if name not in files]:
        raise ModelError(f"{source} lacks {missing[0]}; {INDEX_FILE} names it")
    return [*needed, *(files[name] for name in shards)]


def _is_small(name: str) -> bool:
    """Return whether a file is a small one that weft reads."""
    parts = PurePosixPath(name).parts
    return any(
        len(parts) == pattern.count("/") + 1 and fnmatch(name, pattern) for pattern in SMALL_FILES
    )


def _fetch(source: HubModel, file: _File, counter: _Counter | None) -> Path:
    """Fetch one file, and compare it with its size and hash; raises ModelError."""
    from huggingface_hub import hf_hub_download
    from tqdm.auto import tqdm

    counted = 0

    def count(size: int) -> None:
        nonlocal counted
        counted += size
        if counter is not None:
            counter.add(size)

    class Bar(tqdm):  # type: ignore[misc]
        """huggingface_hub reports its progress to such a class; this one shows nothing."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))
            count(int(options.get("initial") or 0))

        def update(self, n: float | None = 1) -> bool | None:
            count(int(n or 0))
            return None

        # Xet storage also reports bytes on the wire, possibly fewer. They do not count.
        def update_transfer(self, n: float | None = 1) -> None:
            pass

        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
            pass

    try:
        path = hf_hub_download(source.id, file.name, revision=source.revision, tqdm_class=Bar)
    except Exception as error:
        # Most errors from Xet storage have no specific class.
        if not isinstance(error, RuntimeError) and type(error).__module__ != "hf_xet":
            raise
        raise ModelError(
            f"{source.id}: {file.name} does not come from Xet storage ({_first_line(error)}); try "
            "again, or set HF_HUB_DISABLE_XET=1 to fetch it over plain HTTP"
        ) from error
    count(file.size - counted)  # bytes from before, or by another way
    blob = Path(path)
    if damage := _damage(blob, file):
        blob.resolve().unlink(missing_ok=True)
        blob.unlink(missing_ok=True)
        raise ModelError(
            f"{source.id}: {file.name} is damaged: {damage}; it has been deleted, so run the "
            "command again"
        )
    return blob


def _damage(blob: Path, file: _File) -> str | None:
    """Say how a file differs from the hub's; None if it does not."""
    if (size := blob.stat().st_size) != file.size:
        return f"it has {size:,} bytes, the hub's {file.size:,}"
    with blob.open("rb") as data:
        if file.sha256 is not None:
            name, expected = "SHA-256", file.sha256
            found = hashlib.file_digest(data, "sha256").hexdigest()
        elif file.git_hash is not None:
            name, expected = "git hash", file.git_hash
            found = hashlib.sha1(b"blob %d\0" % size + data.read()).hexdigest()
        else:
            return None
    return (
        None
        if found == expected
        else f"its {name} is {found[:12]}..., the hub's {expected[:12]}..."
    )


def _check_space(
    source: object, folder: Path, files: Iterable[_File], here: Iterable[Path]
) -> None:
    """Refuse a download too large for the disk; `here` are files that may exist."""
    parent = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(parent).free
    needed = sum(file.size for file in files)
    needed -= sum(path.stat().st_size for path in here if path.is_file())
    if needed > free:
        raise ModelError(
            f"{source} needs {human_bytes(needed)} in {folder}, where {human_bytes(free)} are "
            "free: set HF_HOME (for s3:// and gs://: XDG_CACHE_HOME) to a folder on a larger disk"
        )


class _hub_errors:  # noqa: N801  # used as a function
    """Turn the hub's errors into a one-line ModelError with advice."""

    def __init__(self, source: HubModel, api: HfApi) -> None:
        self.source, self.endpoint = source, str(api.endpoint)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, ModelError):
            return
        from huggingface_hub import errors

        model, hub = self.source, self.endpoint
        refused = getattr(getattr(error, "response", None), "status_code", None)
        revision = "" if model.revision == "main" else f" --revision {model.revision}"
        elsewhere = (
            f"`hf download {model.id}{revision}` fetches it on a machine with a network; then copy "
            "the cache "
            f"({model.cache}) here, or give its directory"
        )
        no_directory = "" if model.by_url else "there is no such directory, and "
        if isinstance(error, errors.GatedRepoError):
            text = (
                f"its owner asks for consent: accept the terms at {hub}/{model.id}, and set "
                "HF_TOKEN to a token of the same account"
            )
        elif isinstance(error, errors.RevisionNotFoundError):
            text = f"{hub} has the model, but not the revision {model.revision!r}"
        elif isinstance(error, errors.RepositoryNotFoundError) or refused == 404:
            text = (
                f"{no_directory}{hub} has no such model; if it is private, "
                "HF_TOKEN must hold a token that may read it"
            )
        elif refused in (401, 403):
            text = f"{hub} refuses the token in HF_TOKEN (status {refused})"
        elif refused is not None:
            text = f"{hub} answers with status {refused}; try again later"
        elif _caused_by(error, (errors.OfflineModeIsEnabled,)):
            text = f"it is not in the cache, and HF_HUB_OFFLINE is set; {elsewhere}"
        elif _caused_by(error, _network_errors()):
            text = f"{no_directory}{hub} cannot be reached ({_first_line(error)}); {elsewhere}"
        elif isinstance(error, OSError) and error.errno is not None:
            text = (
                f"cannot write to {model.cache}: {error.strerror}; HF_HOME names another folder "
                "for the cache"
            )
        elif isinstance(error, OSError):  # a file with a wrong size
            text = f"{_first_line(error)}; run the command again"
        else:
            return
        raise ModelError(f"{model}: {text}") from error


def _network_errors() -> tuple[type[BaseException], ...]:
    """Return the base classes for connection errors in this huggingface_hub release."""
    names = [name for name in ("httpx2", "httpx") if name in sys.modules]
    clients = [importlib.import_module(name) for name in names]
    return (ConnectionError, TimeoutError, *(client.HTTPError for client in clients))


def _caused_by(error: BaseException | None, kinds: tuple[type[BaseException], ...]) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kinds):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause) or type(cause).__name__).splitlines()[0].rstrip(".")


# Object storage.


def _from_bucket(source: Bucket, progress: Progress, weights: bool) -> None:
    folder = source.copy
    if source.is_complete:
        return
    try:
        for module in DRIVERS[source.scheme]:
            importlib.import_module(module)
    except ImportError:
        extra = f"pip install 'weft[{source.scheme}]'"
        raise ModelError(f"{source} needs {DRIVERS[source.scheme][0]}: {extra}") from None
    import fsspec
    from filelock import FileLock

    # gcsfs warns in each call without credentials, and logs each error that it raises.
    logging.getLogger(DRIVERS[source.scheme][0]).setLevel(logging.CRITICAL)
    folder.mkdir(parents=True, exist_ok=True)
    storage = fsspec.filesystem(source.scheme)
    root = source.url.partition("://")[2]
    with FileLock(f"{folder}.lock"):
        if (folder / COMPLETE).exists():  # another process has fetched it
            return
        try:
            files = _listing(storage, root)
            needed = _needed(
                source, files, lambda file: _copy(storage, root, folder, file, None), weights
            )
            _check_space(source, folder, needed, (folder / file.name for file in needed))
            counter = _Counter(sum(file.size for file in needed), progress)
            for file in needed:
                _copy(storage, root, folder, file, counter)
        except _storage_errors(source.scheme) as error:
            reason = _first_line(error)
            if isinstance(error, FileNotFoundError):  # gcsfs then names only the path
                reason = f"there is no such bucket or file ({reason})"
            raise ModelError(f"{source} cannot be copied to {folder}: {reason}") from error
        if weights:
            (folder / COMPLETE).touch()


def _storage_errors(scheme: str) -> tuple[type[Exception], ...]:
    """Return the base classes for a driver's errors; they have no common one."""
    classes = (path.rpartition(".") for path in DRIVER_ERRORS[scheme])
    return (OSError, *(getattr(sys.modules[module], name) for module, _, name in classes))


def _listing(storage: Any, root: str) -> dict[str, _File]:
    entries: dict[str, Any] = storage.find(root, maxdepth=2, detail=True)
    return {
        name: _File(name, int(entry["size"] or 0))
        for path, entry in entries.items()
        if (name := path.removeprefix(root).lstrip("/")) and entry["type"] == "file"
    }


def _copy(storage: Any, root: str, folder: Path, file: _File, counter: _Counter | None) -> Path:
    """Copy one file; a partial copy continues where it ended."""
    target = folder / file.name
    if target.is_file() and target.stat().st_size == file.size:
        if counter is not None:
            counter.add(file.size)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".incomplete")
    with partial.open("ab") as out:
        if out.tell() > file.size:
            out.seek(0)
            out.truncate()
        if counter is not None:
            counter.add(out.tell())
        tries = 0
        while out.tell() < file.size:
            begin = out.tell()
            end = min(begin + BLOCK, file.size)
            try:
                block = storage.cat_file(f"{root}/{file.name}", start=begin, end=end)
            except (OSError, TimeoutError):
                tries += 1
                if tries == TRIES:
                    raise
                time.sleep(1)
                continue
            if not block:
                raise ModelError(f"{root}/{file.name} ends after {begin:,} of {file.size:,} bytes")
            tries = 0
            out.write(block)
            if counter is not None:
                counter.add(len(block))
    partial.replace(target)
    return target
