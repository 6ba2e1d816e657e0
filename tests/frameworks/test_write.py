"""The writer: whole or not at all."""

from __future__ import annotations

import gzip
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mist_megatron.errors import InputError
from mist_megatron.formats import files
from mist_megatron.formats.aside import name_aside, recover
from mist_megatron.formats.files import write_artifacts, write_file, write_pieces

FILES = {"a.txt": "one\n", "sub/b.sh": "#!/bin/sh\n"}


def listing(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_writes_a_new_folder(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    assert write_artifacts(out, FILES) == (out / "a.txt", out / "sub/b.sh")
    assert listing(out) == FILES
    assert os.access(out / "sub/b.sh", os.X_OK)
    assert not os.access(out / "a.txt", os.X_OK)
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_artifacts(out, FILES)
    assert listing(out) == FILES


def test_the_current_folder_is_filled_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renamed away, the shell would be in a folder that is gone; and a mount cannot be renamed at all."""
    out = tmp_path / "out"
    out.mkdir(mode=0o750)
    monkeypatch.chdir(out)
    before = out.stat()
    write_artifacts(Path(), FILES)
    assert listing(Path()) == listing(out) == FILES
    assert (out.stat().st_ino, out.stat().st_mode) == (before.st_ino, before.st_mode)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_interrupt_while_files_take_their_places_waits_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, calls = Path.replace, []

    def interrupted(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_artifacts(tmp_path, FILES)
    assert listing(tmp_path) == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "sub"]


def test_a_folder_with_something_in_it_needs_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    (out / "sub" / "b.sh").write_text("mine")
    (out / "checkpoint.pt").write_text("weeks of work")
    with pytest.raises(InputError, match="not empty") as told:
        write_artifacts(out, FILES)
    assert "--force" in str(told.value)
    assert listing(out) == {"sub/b.sh": "mine", "checkpoint.pt": "weeks of work"}
    write_artifacts(out, FILES, force=True)
    assert listing(out) == {**FILES, "checkpoint.pt": "weeks of work"}


@pytest.mark.parametrize("fails_at", [0, 1])
@pytest.mark.parametrize("there", [False, True])
def test_an_interrupt_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int, there: bool
) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()
        (out / "a.txt").write_text("before")
    real, calls = files._write_one, []

    def failing(path: Path, text: str) -> None:
        calls.append(path)
        if len(calls) > fails_at:
            raise KeyboardInterrupt
        real(path, text)

    monkeypatch.setattr(files, "_write_one", failing)
    with pytest.raises(KeyboardInterrupt):
        write_artifacts(out, FILES, force=True)
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if there else [])
    if there:
        assert listing(out) == {"a.txt": "before"}


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_one", full)
    with pytest.raises(InputError, match="No space left"):
        write_artifacts(tmp_path / "out", FILES)
    assert not list(tmp_path.iterdir())


def test_out_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        write_artifacts(tmp_path / "out", FILES, force=True)
    with pytest.raises(InputError):
        write_artifacts(tmp_path / "out" / "inner", FILES)


def test_a_folder_in_the_place_of_a_file_replaces_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "sub" / "b.sh").mkdir(parents=True)
    (out / "a.txt").write_text("before")
    with pytest.raises(InputError, match="folder"):
        write_artifacts(out, FILES, force=True)
    assert (out / "a.txt").read_text() == "before"


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", ""])
def test_no_name_leaves_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="inside the output folder"):
        write_artifacts(tmp_path / "out", {name: "x"})


OLD = {"a.txt": "old", "sub/b.sh": "old", "c.txt": "old"}
TOGETHER = {"a.txt": "new", "sub/b.sh": "new", "d/e.txt": "new", "f.txt": "new"}
MOST_EVENTS = 200
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod")


def killed_at(event: int, act: Callable[[], object]) -> bool:
    """Whether a process of its own died at its so many-th change of the file system, without any clean-up."""
    process = os.fork()
    if process == 0:
        seen = 0

        def die(name: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            seen += name in EVENTS and not (name == "open" and arguments[1] == "r")
            if seen == event:
                os._exit(9)

        sys.addaudithook(die)
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9


def visible(folder: Path) -> dict[str, str]:
    return {name: text for name, text in listing(folder).items() if not name.startswith(".mist-")}


@pytest.mark.parametrize("there", ["nothing", "empty", "old"])
def test_killed_at_every_change_of_the_file_system(tmp_path: Path, there: str) -> None:
    """Files are those of before or those of after, never of both; who reads gets all of one of them; the next
    writer needs no more than it would have, and leaves nothing of the dead one."""
    outcomes = set()
    for event in range(1, MOST_EVENTS):
        out = tmp_path / f"{event}" / "out"
        out.parent.mkdir()
        if there != "nothing":
            out.mkdir()
        if there == "old":
            write_artifacts(out, OLD, force=True)
        if not killed_at(event, lambda out=out: write_artifacts(out, TOGETHER, force=there == "old")):
            break
        left = set(visible(out).items()) if out.exists() else set()
        kept = {("c.txt", "old")} & left
        assert left - kept <= set(TOGETHER.items()) or left <= set(OLD.items()), event
        if (out / "a.txt").exists() or there == "old":
            whole = TOGETHER if files.read_text(out / "a.txt") == "new" else OLD
            outcomes.add(whole["a.txt"])
            assert {**OLD, **visible(out)} == {**OLD, **whole}, event
        recover(out)
        again = there == "old" or (out.exists() and bool(visible(out)))
        write_artifacts(out, TOGETHER, force=again)
        assert visible(out) == {**TOGETHER, **dict(kept)}, event
        assert not list(out.parent.rglob(".mist-*")), event
    assert 10 < event < MOST_EVENTS - 1
    assert outcomes == {"old", "new"} if there == "old" else outcomes <= {"new"}


def test_a_file_of_its_own_is_whole_wherever_its_writer_dies(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    for event in range(1, MOST_EVENTS):
        path.write_text("old")
        if not killed_at(event, lambda: write_file(path, "new", force=True)):
            break
        assert path.read_text() in ("old", "new")
    assert 2 < event < MOST_EVENTS - 1
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["f.json"]


def test_what_is_not_ours_or_of_a_living_writer_stays(tmp_path: Path) -> None:
    alive = tmp_path / name_aside(tmp_path).name
    elsewhere = tmp_path / ".mist-new-another.host-1-abcdef12"
    for path in (alive, elsewhere):
        path.mkdir()
    write_artifacts(tmp_path, FILES)
    assert alive.exists() and elsewhere.exists()
    os.utime(elsewhere, (0, 0))
    files.read_text(tmp_path / "a.txt")
    assert alive.exists() and not elsewhere.exists()


def test_one_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "f.json"
    write_file(path, "1\n")
    with pytest.raises(InputError, match="exists"):
        write_file(path, "2\n")
    write_file(path, "2\n", force=True)
    assert path.read_text() == "2\n"
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600
    with pytest.raises(InputError, match="folder"):
        write_file(tmp_path, "x", force=True)


def test_pieces_are_whole_or_not_at_all(tmp_path: Path) -> None:
    """An interrupt in the middle leaves what was there, and nothing beside it."""

    def interrupted() -> Iterator[str]:
        yield "half of "
        raise KeyboardInterrupt

    path = tmp_path / "trace.json"
    path.write_text("before", "utf-8")
    with pytest.raises(KeyboardInterrupt):
        write_pieces(path, interrupted())
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    assert path.read_text("utf-8") == "before"
    write_pieces(path, ["af", "ter"])
    assert path.read_text("utf-8") == "after"


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    """A link's target is replaced, not the link; a pipe (or /dev/stdout) is written to, not replaced."""
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("before", "utf-8")
    link.symlink_to(target)
    write_pieces(link, ["after"])
    assert link.is_symlink()
    assert target.read_text("utf-8") == "after"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_pieces(pipe, ["through"])
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_compressed_by_name(tmp_path: Path) -> None:
    write_pieces(tmp_path / "trace.json.gz", ["{", "}\n"])
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == b"{}\n"
