"""How much memory this process has held at most."""

from __future__ import annotations

from pathlib import Path


def peak() -> float:
    """Return the largest resident size in MB; `ru_maxrss` would be its parent's, where that was larger."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = [line for line in status if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024
