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
from statistics import fmean, median
from typing import Any

from mismatch_ext.versions import installed

KERNELS = {"amx_bf16", "amx_fp16", "avx512_fp16", "avx512_bf16", "avx512f"}
"""Instruction sets by which kernels of bfloat16 and float16 differ on CPUs of one name."""


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


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median; of fewer than six values, which have none, the least and the largest."""
    from scipy import stats  # not above: benchmarks.gpu runs where only the package and vLLM are installed

    found = stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    if math.isnan(found.low):
        return min(values), max(values)
    return float(found.low), float(found.high)


def of_the_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half width of Student's 95 % interval; NaN with one value."""
    from scipy import stats

    mean = fmean(values)
    if len(values) < 2:
        return mean, math.nan
    found = stats.ttest_1samp(values, popmean=mean).confidence_interval(0.95)
    return mean, float(found.high - found.low) / 2


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
