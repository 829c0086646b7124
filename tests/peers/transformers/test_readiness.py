"""What `mismatch-ext readiness` says of folders that hold no checkpoint, and of dtypes by other names."""

from __future__ import annotations

from pathlib import Path

import pytest
from mismatch_ext.adapters import cli


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("/nonexistent", ["checkpoint /nonexistent cannot be loaded", "does not exist", "config.json"]),
        ("~/none/at/all", ["none/at/all does not exist", "give the folder"]),
        ("no-such-folder", ["no-such-folder does not exist"]),
        ("{tmp}/file", ["file is a file", "give the folder"]),
        ("{tmp}", ["cannot be loaded", "config.json"]),
        ("nobody/nothing-of-that-name", ["checkpoint nobody/nothing-of-that-name cannot be loaded"]),
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


@pytest.mark.parametrize(("given", "meant"), [("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16")])
def test_another_name_of_a_dtype(given: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["readiness", "/nonexistent", "--dtype", given]) == 2
    assert (
        f"--dtype: {given!r} is not allowed" in (err := capsys.readouterr().err) and f"Did you mean {meant!r}?" in err
    )


def test_a_checkpoint_in_the_home_folder(
    dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(dense.parent))
    assert cli.main(["readiness", "~/dense"]) == 0
    assert "float16: " in capsys.readouterr().out
