"""Files at paths that a user names: pipes and links stay what they are, and no partial file stays."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.files import write_whole


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, target, link, dangling = (tmp_path / name for name in ("pipe", "target", "link", "dangling"))
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, b"x")
    reader.join(10)
    assert read == [b"x"] and stat.S_ISFIFO(pipe.stat().st_mode)

    target.write_bytes(b"old")
    for path, other in ((link, target), (dangling, tmp_path / "new")):
        path.symlink_to(other)
        write_whole(path, b"new")
        assert path.is_symlink() and other.read_bytes() == b"new"


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunDirectoryError, match=r"report.html cannot be written: No space left"):
        write_whole(path, b"new")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old" and [*tmp_path.iterdir()] == [path]


def test_the_file_that_another_process_has_begun_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, others = tmp_path / "report.html", tmp_path / "report.html.partial"
    path.write_bytes(b"old")
    # The other process begins after this one has looked.
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: others.write_bytes(b"of another"))
    with pytest.raises(RunDirectoryError, match="File exists"):
        write_whole(path, b"new")
    assert (path.read_bytes(), others.read_bytes()) == (b"old", b"of another")
