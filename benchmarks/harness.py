"""What the benchmarks share: paired timing, intervals, peak memory, what was measured on, runs that keep what they print."""

from __future__ import annotations

import datetime
import math
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from mismatch_ext.versions import installed

KERNELS = {"amx_bf16", "amx_fp16", "avx512_fp16", "avx512_bf16", "avx512f"}
"""Instruction sets by which kernels of bfloat16 and float16 differ on CPUs of one name."""
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % points of Student's t by degrees of freedom; with more than listed the last one is a little wide."""


def paired(
    name: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    *,
    equal: str,
    repeats: int = 15,
    wait: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Time two functions in turn, so that a machine that drifts affects both.

    Args:
        name: Name of the comparison.
        ours: Our function.
        theirs: The peer's.
        equal: Which of their results were found equal before this call.
        repeats: Number of runs of each.
        wait: Waits until work that a function only started, as on a GPU, is done.

    Returns:
        Medians in seconds, and theirs over ours pair by pair (median): above 1, ours is faster.
    """
    seconds: list[tuple[float, float]] = []
    ours(), theirs(), wait()
    for _ in range(repeats):
        times = []
        for function in (ours, theirs):
            start = time.perf_counter()
            function()
            wait()
            times.append(time.perf_counter() - start)
        seconds.append((times[0], times[1]))
    return {
        "name": name,
        "ours": median(a for a, _ in seconds),
        "theirs": median(b for _, b in seconds),
        "ratio": median(b / a for a, b in seconds),
        "equal": equal,
    }


def interval(values: Sequence[float], outside: float = 0.05) -> tuple[float, float]:
    """Return bounds of the median that it lies outside of with at most this probability; of few values, all of them."""
    ordered, count = sorted(values), len(values)
    below = (sum(math.comb(count, k) for k in range(at + 1)) / 2**count for at in range(count // 2))
    left_out = sum(1 for share in below if 2 * share <= outside)
    first = max(left_out - 1, 0)
    return ordered[first], ordered[count - 1 - first]


def of_the_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half width of Student's 95 % interval; NaN with one value."""
    if len(values) < 2:
        return fmean(values), math.nan
    return fmean(values), T_975[min(len(values) - 2, len(T_975) - 1)] * stdev(values) / math.sqrt(len(values))


def measured_on() -> dict[str, Any]:
    """Return machine, versions, date and commit, as a record has them."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()]
    cpu = {name.strip(): value.strip() for name, _, value in lines}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit.stdout.strip() or None,
        "cpu": [cpu.get("model name", platform.machine()), *sorted(KERNELS & {*cpu.get("flags", "").split()})],
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version()}
        | {name: installed(name) for name in ("torch", "transformers", "trl", "vllm", "verl")},
    }


def peak() -> float:
    """Return the largest resident size in MB; `ru_maxrss` would be its parent's, where that was larger."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = [line for line in status if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def be_quiet(out: Path) -> None:
    """Give this process its own port, and write everything that it and its libraries print from now on to `out/log.txt`."""
    with socket.socket() as free:  # on a CPU, accelerate takes a fixed port, which another run may hold
        free.bind(("localhost", 0))
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(free.getsockname()[1])
    log = os.open(out / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
