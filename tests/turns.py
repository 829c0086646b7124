"""Whose turn it is: what is too much for one commit's run takes turns by the number of commits."""

from __future__ import annotations

import subprocess
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
