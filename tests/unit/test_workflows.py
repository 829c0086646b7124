"""What CI runs: an installation that fails ends its job, and every action is the one that was read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
EXPRESSION = re.compile(r"\$\{\{.*?\}\}")


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_failed_installation_fails_its_job(workflow: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("pip", "make", "sudo"):
        tool = folder / name
        tool.write_text("#!/bin/sh\nexit 1\n")
        tool.chmod(0o755)
    installs = [
        step for step in steps(workflow) if re.search(r"pip install|make |apt-get install", step.get("run", ""))
    ]
    assert installs
    for step in installs:
        # The environment's folder is an expression, or is named; here each has the failing tools.
        command = re.sub(r"\S*bin/pip", str(folder / "pip"), EXPRESSION.sub("x", step["run"]))
        command = re.sub(r"\b(make|sudo) ", rf"{folder}/\1 ", command)
        done = subprocess.run(["bash", "-e", "-c", command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode != 0, step["run"]
        assert not step.get("continue-on-error"), step["run"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(workflow: Path) -> None:
    used = re.findall(r"uses: *(.*)", workflow.read_text(encoding="utf-8"))
    assert used
    for action in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action), action
