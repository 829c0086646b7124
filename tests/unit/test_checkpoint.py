"""What lies beside a host's own files in a checkpoint: written in one go, read strictly, and compared with the present block."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mismatch_ext.checkpoint import (
    STATE_FILE,
    changed_settings,
    read_state,
    write_state,
)
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import RecordError
from mismatch_ext.states import from_json, state, to_json


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-3" / STATE_FILE
    assert read_state(path) is None
    write_state(path, {"kl": {"coef": 0.1}, "lr": None, "weight_version": 3})
    assert read_state(path) == {"schema": 2, "kl": {"coef": 0.1}, "lr": None, "weight_version": 3}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "it is no JSON"),
        ("null", "holds None; .* reads a JSON object of schema 2"),
        ('{"schema": 9, "lr": null}', "holds {'schema': 9, 'lr': None}; .* reads a JSON object of schema 2"),
    ],
)
def test_what_cannot_be_is_named_with_file_and_remedy(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / STATE_FILE
    path.write_text(text)
    with pytest.raises(RecordError, match=found) as error:
        read_state(path)
    assert str(error.value).startswith(str(path))
    assert "Resume from another checkpoint, or remove this file" in str(error.value)


def block(**sections: Any) -> dict[str, Any]:
    parsed = MismatchConfig.parse(sections)
    assert parsed is not None
    return dict(json.loads(json.dumps(parsed.to_dict())))  # as a checkpoint holds it


def test_changed_settings_are_named_with_both_values() -> None:
    before = block(kl={"coef": 0.1, "target_kl": 1e-3}, lr={"period": 5}, routing={"mode": "R3"})
    now = block(kl={"coef": 0.3, "target_kl": 1e-2}, lr={"period": 5}, correction={"preset": "icepop"})
    said = changed_settings(before, now)
    assert said is not None
    for change in (
        "mismatch.kl.coef was 0.1 and is 0.3",
        "mismatch.kl.target_kl was 0.001 and is 0.01",
        "mismatch.routing was given and is absent",
        "mismatch.correction was absent and is given",
    ):
        assert change in said
    assert "mismatch.lr" not in said and said.endswith("The present ones hold from here on.")


@state
class Example:
    coef: float
    steps: int = 0
    lengths: tuple[float, ...] = ()
    best: float | None = None


def test_a_state_comes_back_from_json() -> None:
    value = Example(coef=0.1, steps=3, lengths=(1.0, 2.5))
    assert from_json(Example, json.loads(json.dumps(to_json(value))), "kl") == value


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"coef": "x"}, "kl.coef: Input should be a valid number"),
        ({"coef": float("nan")}, "kl.coef: Input should be a finite number"),
        ({"coef": 1.0, "steps": 1.5}, "kl.steps: Input should be a valid integer"),
        ({}, "kl.coef: Field required"),
        ({"coef": 1.0, "gone": 2}, "kl.gone: Unexpected keyword argument"),
    ],
)
def test_a_state_of_other_types_is_refused_by_field(data: Any, sentence: str) -> None:
    with pytest.raises(RecordError, match=sentence):
        from_json(Example, data, "kl")


def test_an_older_state_is_removed_if_the_new_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / STATE_FILE
    write_state(path, {"kl": None})

    def full(old: Any, new: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        write_state(path, {"kl": None})
    assert read_state(path) is None and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_told_and_one_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").touch()
    path = tmp_path / "checkpoint-3" / STATE_FILE
    with pytest.warns(UserWarning, match="mismatch.json cannot be written: .*The trainer's checkpoint is whole"):
        write_state(path, {"kl": None})
    unreadable = Path("/proc/self/mem")  # its first page is mapped nowhere
    with pytest.raises(RecordError, match="/proc/self/mem cannot be read: .*Resume from another checkpoint"):
        read_state(unreadable)
