"""The table: steps until responses are half as long, what the clip stopped, and the difference from each arm's control."""

from __future__ import annotations

import math
import statistics

from benchmarks.harness import of_the_mean
from benchmarks.stability.arms import ARMS, CONTROLS, EXPERTS, REAL, Arm, ExpertArm, RealArm
from benchmarks.stability.record import RECORDED, RECORDED_REAL, ROOT, Runs, recorded
from benchmarks.stability.train import Curves

FIRST = 20
EVERY: dict[str, Arm | ExpertArm | RealArm] = {**REAL, **ARMS, **EXPERTS}
BUDGET = {**dict.fromkeys(EVERY, 60), **dict.fromkeys(EXPERTS, 50)}
LONG = 32
PAGE = ROOT / "evidence/stability.md"
BEGIN, END = "<!-- table: python -m benchmarks.stability --page -->", "<!-- end of table -->"


def half(curves: Curves, target: float = LONG / 2) -> int | None:
    """Return the first step from which the mean length of three is at most a target; None where there is none."""
    lengths = curves["length"]
    for at in range(len(lengths)):
        window = lengths[at : at + 3]
        if statistics.fmean(window) <= target:
            return at
    return None


def halves(name: str, seeds: dict[int, Curves]) -> dict[int, int]:
    """Return the steps to half the length by seed; the budget where a run never got there."""
    return {seed: BUDGET[name] if (at := half(curves)) is None else at for seed, curves in seeds.items()}


def difference(runs: Runs, name: str) -> tuple[float, float] | None:
    """Return the mean difference in steps from the arm's control, by seed, with its half width; None where there is none."""
    other = CONTROLS.get(name)
    if other not in runs or name not in runs:
        return None
    mine, theirs = halves(name, runs[name]), halves(other, runs[other])
    pairs = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    return of_the_mean(pairs) if pairs else None


def first(seeds: dict[int, Curves], measure: str) -> float:
    """Return the mean of a measure over the first steps and all seeds."""
    values = [v for curves in seeds.values() for v in curves.get(measure, [])[:FIRST] if math.isfinite(v)]
    return statistics.fmean(values) if values else math.nan


def largest(seeds: dict[int, Curves], measure: str) -> float:
    """Return the mean over seeds of a measure's largest value."""
    found = [max((v for v in c.get(measure, []) if math.isfinite(v)), default=math.nan) for c in seeds.values()]
    return statistics.fmean(found)


def table(runs: Runs) -> str:
    """Return the table as Markdown, a section per group."""
    lines = []
    for group in dict.fromkeys(arm.group for arm in EVERY.values()):
        rows = [row(runs, name, arm) for name, arm in EVERY.items() if arm.group == group and name in runs]
        if rows:
            lines += [
                f"**{group}**",
                "",
                "| arm | what it is | steps to half, by seed | mean | against its control | stopped | ends | by advantage | k3 |",
                "|---|---|---|---|---|---|---|---|---|",
                *rows,
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


def row(runs: Runs, name: str, arm: Arm | ExpertArm | RealArm) -> str:
    """Return an arm's row."""
    seeds = runs[name]
    found = halves(name, seeds)
    never = {seed for seed, curves in seeds.items() if half(curves) is None}
    by_seed = " ".join(f">{n}" if seed in never else str(n) for seed, n in found.items())
    mean, width = of_the_mean(list(found.values()))
    against, other = difference(runs, name), CONTROLS.get(name)
    ends = first(seeds, "stopped_ends")
    told = "" if against is None else f"{against[0]:+.1f} ± {against[1]:.1f} ({other})"
    return (
        f"| {name} | {arm.said} | {by_seed} | {'≥ ' if never else ''}{mean:.1f} ± {width:.1f} | {told} "
        f"| {share(first(seeds, 'stopped'), 1)} | {share(ends, 0)} "
        f"| {first(seeds, 'advantage_gap'):+.2g} | {largest(seeds, 'k3'):.2g} |"
    )


def share(value: float, digits: int) -> str:
    """Write a share in percent; nothing where it is not known."""
    return f"{100 * value:.{digits}f} %" if math.isfinite(value) else ""


def write_page() -> None:
    """Write the tables of what is recorded between the marks of evidence/stability.md."""
    parts = []
    for file in (RECORDED_REAL, RECORDED):
        on, runs = recorded(file)
        versions = ", ".join(f"{name} {version}" for name, version in on["versions"].items())
        cpu = on["cpu"] if isinstance(on["cpu"], str) else " ".join(on["cpu"])
        said = f"Measured {on['date']} on {cpu}, a core a run, with {versions}; commit {on['commit'][:10]}."
        parts.append(f"{said}\n\n{table(runs)}")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n".join(parts)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}", encoding="utf-8")
