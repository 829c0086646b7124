"""Files at paths that a user names: devices, pipes and links stay what they are, and no partial file stays."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from mismatch_ext import cli
from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.files import write_whole
from tests.unit.synthetic_runs import write_run


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


def test_a_report_does_not_replace_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", "bf16", steps=3)
    null, full = tmp_path / "null", tmp_path / "full"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(full, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        null.write_bytes(b"")
    except OSError:
        pytest.skip("no device can be made here")
    assert cli.main(["report", str(run), "--out", str(null)]) == 0
    assert cli.main(["report", str(run), "--out", str(full)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert all(stat.S_ISCHR(node.stat().st_mode) for node in (null, full))
    assert {p.name for p in tmp_path.iterdir()} == {"run", "null", "full"}


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


def test_a_missing_folder_is_not_made(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "bf16", steps=3)
    assert cli.main(["report", str(run), "--out", str(tmp_path / "typo" / "r.html")]) == 2
    assert not (tmp_path / "typo").exists()


def test_another_process_keeps_the_file_that_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    partial = tmp_path / "report.html.partial"
    plain, calls = Path.unlink, list[Path]()

    def removed_and_made_by_another(self: Path, missing_ok: bool = False) -> None:
        plain(self, missing_ok=missing_ok)
        if not calls:
            partial.write_bytes(b"of another process")
        calls.append(self)

    monkeypatch.setattr(Path, "unlink", removed_and_made_by_another)
    with pytest.raises(RunDirectoryError):
        write_whole(path, b"new")
    assert partial.read_bytes() == b"of another process"
    assert not path.exists()
