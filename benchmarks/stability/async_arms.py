"""Ways to train by TRL's AsyncGRPO, and the table of what they took."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.stability.record import Runs
from benchmarks.stability.table import first, half

STEPS = 60


@dataclass(frozen=True, kw_only=True)
class AsyncArm:
    """One way to train by TRL's AsyncGRPO.

    Args:
        said: What it is, for the table.
        engine: The server's dtype.
        preset: Of `mismatch.correction`; None for TRL's own loss, which clips on the ratio to the engine.
        precision: Of `mismatch.precision`; None for a trainer in float32, whatever the server is in.
        seeds: How many seeds are run.
    """

    said: str
    engine: str = "float32"
    preset: str | None = None
    precision: str | None = None
    seeds: int = 2


ASYNC: dict[str, AsyncArm] = {
    "float32": AsyncArm(said="float32 on both sides, TRL's loss: control"),
    "float32 tis": AsyncArm(said="the same, `decoupled_token_is`", preset="decoupled_token_is"),
    "bf16": AsyncArm(said="float32 trainer, bf16 server, TRL's loss", engine="bfloat16"),
    "bf16 tis": AsyncArm(
        said="the same, `decoupled_token_is`", engine="bfloat16", preset="decoupled_token_is", seeds=1
    ),
    "FP16": AsyncArm(said="uniform FP16, `LossScaler`, TRL's loss", engine="float16", precision="float16", seeds=1),
}


def table(runs: Runs) -> str:
    """Return the table as Markdown."""
    lines = [
        "**TRL's AsyncGRPO with a vLLM server**",
        "",
        "| arm | what it is | steps to half, by seed | stopped by TRL's clip | versions behind | k3 | its numerics |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, arm in ASYNC.items():
        if name not in runs:
            continue
        seeds = runs[name]
        reached = " ".join(f">{STEPS}" if (at := half(curves)) is None else str(at) for curves in seeds.values())
        lines.append(
            f"| {name} | {arm.said} | {reached} | {100 * first(seeds, 'stopped'):.1f} % "
            f"| {first(seeds, 'staleness'):.1f} | {first(seeds, 'k3'):.2g} | {first(seeds, 'numerics'):.2g} |"
        )
    return "\n".join(lines) + "\n"
