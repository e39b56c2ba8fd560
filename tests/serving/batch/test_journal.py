"""The journal: whatever a crash leaves, each row is in the output once after the next run."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.disks import small_disk

from weft.errors import ConfigError, WeftError
from weft.serving.batch.journal import Answer, Journal

SETTINGS = {"seed": 0}


def line(row: int, text: str = "") -> bytes:
    """What is written of a row: its length is another for each."""
    return json.dumps({"row": row, "text": text or "é" * (row % 7)}).encode() + b"\n"


def answers(rows: Sequence[int], files: int = 1) -> list[Answer]:
    return [Answer(row, row % files, line(row)) for row in rows]


class Scene:
    """A batch of `total` rows in a folder, and the process that runs it."""

    def __init__(self, folder: Path, total: int, files: int) -> None:
        self.state = folder / "state"
        self.paths = [folder / f"out-{file}" for file in range(files)]
        self.total = total
        with closing(Journal(self.state, self.paths)) as journal:
            journal.begin(SETTINGS, ((row, f"line {row + 1}", None) for row in range(total)))

    def started(self) -> Journal:
        journal = Journal(self.state, self.paths)
        journal.recover()
        journal.open()
        return journal

    def left(self, journal: Journal) -> list[int]:
        done = journal.done(0, self.total)
        return [row for row in range(self.total) if row not in done]

    def rows(self) -> list[int]:
        """In all files; each line must be whole."""
        found = []
        for file, path in enumerate(self.paths):
            for text in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
                row = json.loads(text)["row"]
                assert text == line(row)
                assert row % len(self.paths) == file
                found.append(row)
        return found


CRASHES = st.one_of(
    st.tuples(st.just("clean"), st.just(0)),
    # Some of the next group is in a file, which the state does not know: a part of a line, or more.
    st.tuples(st.just("torn"), st.integers(0, 200)),
    st.tuples(st.just("short"), st.integers(0, 400)),
    # The last transactions are lost.
    st.tuples(st.just("lags"), st.integers(0, 3)),
)


@settings(max_examples=60)
@given(
    runs=st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=5), CRASHES), max_size=6),
    files=st.integers(1, 2),
)
def test_each_row_is_there_once_whatever_happens(
    runs: list[tuple[list[int], tuple[str, int]]], files: int
) -> None:
    """Some groups, a crash, and again; the last run does what is left."""
    with TemporaryDirectory() as folder:
        scene = Scene(Path(folder), 40, files)
        for groups, (crash, amount) in runs:
            states = []
            with closing(scene.started()) as journal:
                left = scene.left(journal)
                for size in groups:
                    states.append(_copied(scene.state, Path(folder) / f"state-{len(states)}"))
                    group, left = left[:size], left[size:]
                    journal.append(answers(group, files))
                assert sorted(scene.rows() + left) == list(range(scene.total))
            if crash == "torn" and left:
                data = line(left[0]) + line(left[-1])
                with scene.paths[left[0] % files].open("ab") as file:
                    file.write((data * 9)[:amount])
            elif crash == "short":
                path = scene.paths[amount % files]
                data = path.read_bytes()
                path.write_bytes(data[: max(0, len(data) - amount)])
            elif crash == "lags" and states:
                shutil.copy(states[max(0, len(states) - 1 - amount)], scene.state)
        with closing(scene.started()) as journal:
            assert sorted(scene.rows() + scene.left(journal)) == list(range(scene.total))
            journal.append(answers(scene.left(journal), files))
            assert sum(journal.counts()) == scene.total
        assert sorted(scene.rows()) == list(range(scene.total))


def _copied(state: Path, to: Path) -> Path:
    """The state as it is on the disk: its log is a part of it."""
    import sqlite3

    shutil.copy(state, to)
    log = Path(f"{state}-wal")
    if log.exists():
        shutil.copy(log, f"{to}-wal")
    with closing(sqlite3.connect(to)) as db:  # which takes the log in, and removes it
        db.execute("PRAGMA journal_mode = DELETE")
    return to


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, 10, 1)


def test_what_others_have_written_is_not_cut(scene: Scene) -> None:
    with closing(scene.started()) as journal:
        journal.append(answers([3, 1]))
        journal.append(answers([2]))
    (path,) = scene.paths
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"row": 1', b'"row": 7'))
    bad = path.read_bytes()
    with (
        closing(Journal(scene.state, scene.paths)) as journal,
        pytest.raises(ConfigError, match=r"bytes 0 to \d+ of .*out-0 have changed"),
    ):
        journal.recover()
    assert path.read_bytes() == bad
    path.write_bytes(good)
    with closing(Journal(scene.state, scene.paths)) as journal:
        assert journal.recover() == 0
        assert journal.counts() == [3]


def test_a_row_cannot_be_done_twice(scene: Scene) -> None:
    with closing(scene.started()) as journal:
        journal.append(answers([1, 2]))
        with pytest.raises(WeftError, match="UNIQUE constraint failed"):
            journal.append(answers([3, 2]))
        journal.append(answers([3]))
    assert scene.rows() == [1, 2, 3]


def test_a_state_has_one_user(scene: Scene) -> None:
    with (
        closing(Journal(scene.state, scene.paths)),
        pytest.raises(ConfigError, match="another process has it"),
    ):
        Journal(scene.state, scene.paths)


def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE mine (x)")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="another program has made this database"):
        Journal(path, [tmp_path / "out"])
    assert path.read_bytes() == before


def test_duplicates_are_noted_with_the_first(tmp_path: Path) -> None:
    ids = ["a", None, "b", "a", None, "\ud800", "a"]
    with closing(Journal(tmp_path / "state", [tmp_path / "out"])) as journal:
        journal.begin(SETTINGS, ((row, f"line {row + 1}", i) for row, i in enumerate(ids)))
        assert journal.duplicates(0, 10) == {3: "line 1", 6: "line 1"}
        assert journal.duplicates(4, 6) == {}
        assert journal.total == len(ids)


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk(256 * 1024) as path:
        yield path


def test_a_full_disk_stops_it_and_room_lets_it_go_on(disk: Path) -> None:
    """The outputs and the state are on it; the last group fails and leaves nothing behind."""
    scene = Scene(disk, 1000, 1)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(100 * 1024))
    with closing(scene.started()) as journal:
        done = 0
        with contextlib.suppress(WeftError):
            while done < scene.total:
                journal.append(answers(range(done, done + 5)))
                done += 5
        assert 0 < done < scene.total
        with pytest.raises(WeftError, match=r"No space left on device|disk is full"):
            journal.append([Answer(done, 0, line(done, "x" * 200_000))])
        assert scene.rows() == list(range(done))
    ballast.unlink()
    with closing(scene.started()) as journal:
        assert scene.left(journal)[0] == done
        journal.append(answers(scene.left(journal)))
    assert scene.rows() == list(range(scene.total))


_LIMITED = """
import resource, sys
from pathlib import Path
from weft.errors import WeftError
from weft.serving.batch.journal import Answer, Journal

journal = Journal(Path(sys.argv[1]), [Path(sys.argv[2])])
journal.open()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    for row in range(1000):
        journal.append([Answer(row, 0, b'{"row": %d, "text": "' % row + b"x" * 3000 + b'"}\\n')])
except WeftError as error:
    print(row, error)
"""


def test_a_file_that_must_not_grow_stops_it(scene: Scene) -> None:
    """A write that is cut short by the limit, in the middle of a line, leaves whole lines."""
    command = [sys.executable, "-c", _LIMITED, str(scene.state), str(scene.paths[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row, _, message = done.stdout.partition(" ")
    assert "File too large" in message or "disk" in message
    lines = scene.paths[0].read_text().splitlines()
    assert [json.loads(text)["row"] for text in lines] == list(range(int(row)))
    with closing(Journal(scene.state, scene.paths)) as journal:
        assert journal.recover() == 0
        assert journal.counts() == [len(lines)]
