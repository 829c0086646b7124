"""Which settings of the main job are run: by model and `--full`, by name, and those that an earlier call has not measured."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from examples import demo
from examples.sequences import FILE


def test_settings_are_chosen_by_name_in_the_models_own_order() -> None:
    assert [setting.name for setting in demo.settings("real", False, ["fp32", "bf16"])] == ["bf16", "fp32"]
    assert [setting.name for setting in demo.settings("moe", False)] == list(demo.SHORT["moe"])


class StoppedHere(Exception):
    """Ends the job before its tables."""


@pytest.mark.parametrize(("resume", "measured"), [(True, ["fp32"]), (False, ["bf16", "fp32"])])
def test_a_resumed_call_measures_what_an_earlier_one_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool, measured: list[str]
) -> None:
    (tmp_path / "bf16").mkdir()
    (tmp_path / "bf16" / FILE).write_text("{}", encoding="utf-8")
    (tmp_path / "fp32").mkdir()  # it was begun
    trained: list[str] = []

    def train(setting: demo.Setting, *_: Any, **__: Any) -> float:
        trained.append(setting.name)
        return 1.0

    def report(*_: Any, **__: Any) -> Any:
        raise StoppedHere

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "read_run", lambda _: SimpleNamespace())
    monkeypatch.setattr(demo.subprocess, "run", report)
    arguments = argparse.Namespace(full=False, settings=["bf16", "fp32"], prompts=None, steps=None, resume=resume)
    with pytest.raises(StoppedHere):
        demo.demonstrate("dense", tmp_path, arguments, False, Console(file=io.StringIO()))
    assert trained == measured
