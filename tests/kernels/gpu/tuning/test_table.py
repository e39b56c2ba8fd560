"""The file of what was tuned: what is recorded is loaded, and what is damaged is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.costs import METHODS, Config
from weft.kernels.gpu.tuning.table import Entry, Key, Table, TuningError

# The bucket of rows.


@given(st.integers(1, 1 << 20))
def test_a_bucket_holds_its_rows_and_is_less_than_twice_as_large(rows: int) -> None:
    found = tuned.bucket(rows)
    assert rows <= found
    assert found < max(2 * rows, 17)
    assert tuned.bucket(found) == found
    assert tuned.bucket(rows + 1) >= found
    assert found in tuned.buckets(rows)


@given(st.integers(1, 1 << 16))
def test_buckets_are_those_of_all_rows(rows: int) -> None:
    assert tuned.buckets(rows)[-1] == tuned.bucket(rows)
    edges = [1, *(edge + 1 for edge in tuned.buckets(rows)[:-1])]
    assert tuned.buckets(rows) == [tuned.bucket(edge) for edge in edges]


# The file.

POWERS = st.sampled_from([0, 1, 2, 16, 128, 256])
CONFIGS = st.builds(
    Config,
    method=st.sampled_from(sorted(METHODS)),
    block_m=POWERS,
    block_n=POWERS,
    block_k=POWERS,
    stages=st.integers(0, 8),
    warps=POWERS,
    senders=st.integers(0, 1000),
    splits=st.integers(0, 64),
)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
KEYS = st.fixed_dictionaries(
    {
        "op": TEXTS,
        "device": TEXTS,
        "world_size": st.integers(1, 1024),
        "dtype": TEXTS,
        "rows": st.integers(1, 1 << 20),
        "n": st.integers(1, 1 << 20),
        "k": st.integers(0, 1 << 20),
        "triton": TEXTS,
    }
)
TIMES = st.floats(1e-3, 1e9)
TABLES = st.lists(st.tuples(KEYS, CONFIGS, TIMES), max_size=4).map(
    lambda rows: {
        Key(**key): Entry(**key, config=config, microseconds=time) for key, config, time in rows
    }
)


@settings(max_examples=60, deadline=None)
@given(tables=st.lists(TABLES, min_size=1, max_size=3))
def test_what_was_recorded_is_loaded(
    tables: list[Table], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tuning") / "deeper" / "tuning.json"
    expected: Table = {}
    for table in tables:
        tuned.record(path, table)
        expected |= table
        assert tuned.load(path) == expected
    assert sorted(file.name for file in path.parent.iterdir()) == ["tuning.json", "tuning.lock"]


def entry(**changes: object) -> dict[str, object]:
    fields: dict[str, object] = {
        "op": "all_gather",
        "device": "CPU",
        "world_size": 2,
        "dtype": "bfloat16",
        "rows": 16,
        "n": 64,
        "k": 0,
        "triton": "3.6.0",
        "config": {"method": "push"},
        "microseconds": 1.5,
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def write(path: Path, *entries: dict[str, object], form: object = 1) -> None:
    path.write_text(json.dumps({"format": form, "entries": entries}))


def test_the_file_reads_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, entry(n=2), entry(n=1))
    tuned.record(path, {})
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert [json.loads(line.rstrip(","))["n"] for line in lines[1:3]] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"entries": []}', "missing required field `format`"),
        ('{"format": 1}', "missing required field `entries`"),
        ('{"format": 1, "entries": [], "more": 1}', "unknown field `more`"),
        ([entry(more=1)], r"unknown field `more` - at `\$.entries\[0\]`"),
        ([entry(), entry(config={"method": "push", "more": 1})], r"`more` - at `\$.entries\[1\]"),
        ([entry(config={"method": "fax"})], "method is 'fax'; it must be one of copy_engine,"),
        ([entry(config={"method": "push", "block_m": 48})], "block_m is 48; it must be a power"),
        ([entry(config={"method": "push", "senders": -1})], "senders is -1"),
        ([entry(world_size=0)], "world_size"),
        ([entry(microseconds=0)], "microseconds"),
        ([entry(rows="many")], "rows"),
        ([entry(triton=None)], "missing required field `triton`"),
        ([entry(), entry(microseconds=7)], "two entries for op all_gather, device CPU"),
    ],
)
def test_a_damaged_file_is_refused_and_kept(
    text: str | list[dict[str, object]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tuning.json"
    if isinstance(text, str):
        path.write_text(text)
    else:
        write(path, *text)
    before = path.read_bytes()
    with pytest.raises(TuningError, match=message) as error:
        tuned.load(path)
    assert str(path) in str(error.value)
    with pytest.raises(TuningError, match=message):
        tuned.record(path, {})
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="Is a directory"):
        tuned.load(tmp_path)


def test_another_format_is_not_read_and_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text('{"format": 2, "new": true}')
    assert tuned.load(path) == {}
    with pytest.raises(TuningError, match="format 2, but this version of weft writes format 1"):
        tuned.record(path, {})
    assert path.read_text() == '{"format": 2, "new": true}'


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.json"
    write(path, entry())
    before = path.read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(tuned.os, "replace", fail)
    with pytest.raises(TuningError, match="No space left on device"):
        tuned.record(path, {})
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tuning.json", "tuning.lock"]


def test_those_who_write_at_once_keep_each_others_entries(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"

    def add(n: int) -> None:
        fields = entry(n=n)
        config = Config(method="push")
        one = Entry(**{**fields, "config": config})  # type: ignore[arg-type]
        named = {name: fields[name] for name in Key.__struct_fields__ if name in fields}
        key = Key(**named)  # type: ignore[arg-type]
        tuned.record(path, {key: one})

    threads = [threading.Thread(target=add, args=(n,)) for n in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.n for key in tuned.load(path)) == list(range(1, 13))


def test_the_file_is_in_the_users_cache(tmp_path: Path) -> None:
    home = Path.home() / ".cache"
    assert tuned.default_path({"XDG_CACHE_HOME": "/c"}) == Path("/c/weft/tuning.json")
    assert tuned.default_path({"XDG_CACHE_HOME": "relative"}) == home / "weft" / "tuning.json"
    assert tuned.default_path({}) == home / "weft" / "tuning.json"
