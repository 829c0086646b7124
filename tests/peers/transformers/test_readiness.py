"""What `mismatch-ext readiness` says of folders that hold no checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from mismatch_ext.adapters import cli


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("/nonexistent", ["checkpoint /nonexistent cannot be loaded", "does not exist", "config.json"]),
        ("{tmp}/file", ["file is a file", "give the folder"]),
        ("{tmp}", ["cannot be loaded", "config.json"]),
    ],
)
def test_what_is_no_checkpoint(
    folder: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "file").write_text("{}")
    assert cli.main(["readiness", folder.format(tmp=tmp_path)]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: ") and all(word in err for word in words), err
