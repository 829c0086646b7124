"""Whose turn it is: what is too much for one commit's run takes turns by the number of commits.

`python -m tests.turns` runs what is due after the tests: a slice of the evidence on even numbers, a stack of `make stack` on odd
ones. Either takes ten minutes or so; both at each commit would be more than a run has.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commits() -> int:
    """Return the number of commits up to this one; 0 where there is no checkout, or one without its history."""
    command = ["git", "rev-list", "--count", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return int(done.stdout) if done.returncode == 0 else 0


def turn(count: int, number: int) -> int:
    """Return which of `count` things has its turn at a number: each has it once in `count` numbers in a row."""
    return number % count


def due(number: int) -> list[str]:
    """Return the command that is due at a number of commits."""
    if number % 2 == 0:
        return ["make", "evidence", "SLICE=commit"]
    return ["make", "stack", "STACK=commit", "QUICK=1"]


if __name__ == "__main__":
    sys.exit(subprocess.run(due(commits()), cwd=ROOT).returncode)
