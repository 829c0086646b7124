"""Versions of verl that nobody has run: what it does decides, and not its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.peers.scenarios import Run, named
from tests.peers.trl.copies import Change, copied
from tests.peers.verl.copies import HARMFUL, HARMLESS

scenarios = named("tests.peers.verl.in_process.scenarios_versions")


def on_copy(run: Run, model: Path, folder: Path, change: Change) -> Any:
    """Run the scenario on a copy of verl 0.9.1 that says it is 0.9.2."""
    copy = copied(folder, change, "verl", "0.9.2")
    found = run(scenarios.newer, fresh=True, env={"PYTHONPATH": str(copy)}, model=model, timeout=300).expect()
    assert found["verl"].startswith(str(copy))
    return found


def test_a_newer_version_that_does_the_same_runs_with_one_warning_and_the_same_numbers(
    run: Run, moe: Path, tmp_path: Path
) -> None:
    found = on_copy(run, moe, tmp_path / "copy", HARMLESS)
    stock = run(scenarios.newer, model=moe).expect()
    assert stock["untested"] == stock["refused"] == found["refused"] == []
    assert len(found["untested"]) == 1 and "verl 0.9.2" in found["untested"][0]
    assert (found["logprobs"], found["parameters"]) == (stock["logprobs"], stock["parameters"])


@pytest.mark.parametrize("name", HARMFUL)
def test_a_newer_version_that_does_something_else_is_refused_by_what_was_seen(
    run: Run, moe: Path, tmp_path: Path, name: str
) -> None:
    change, seen = HARMFUL[name]
    refused = on_copy(run, moe, tmp_path / "copy", change)["refused"]
    for section, words in seen.items():
        (said,) = {line for line in refused if line.startswith(section) and words in line}
        # What is seen at the start is advised on; what a pass shows may also be an override of the user's own.
        assert ("pip install verl==0.9.1" in said) != ("forward_step" in said)
