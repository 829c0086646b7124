"""Numerics and drift in the report, for runs whose rollouts may have been sampled with older weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mismatch_ext.host_names import PREFIX
from mismatch_ext.log_reading import RunData
from mismatch_ext.report.charts import Figure, present
from mismatch_ext.report.lines import over_steps
from mismatch_ext.report.summary import ABS_DIFF_MEAN, pooled
from mismatch_ext.staleness import SOURCES

MARK = PREFIX + "staleness_max"
"""This metric is in every log of a run whose rollouts may have been sampled with older weights."""
NUMERICS = "numerics/"
SOURCE_LABELS = {"batch": "tokens of the batch", "buffer": "tokens sampled for it"}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a run's gap, pooled over its steps; version v of the weights sampled, version w is trained.

    Args:
        numerics: Mean |rollout(v) - train(v)|, both sides at one version, nats; None if no step could measure it.
        k3: k3 of the same tokens.
        total: Mean |rollout(v) - train(w)| of all tokens, nats.
        stale: The same mean over stale tokens only.
        staleness: Mean number of updates since the tokens were sampled.
        unknown: Number of logs without `numerics`.
        logs: Number of all logs.
        sources: For each source of `numerics`, the number of logs and of tokens that it gave.
    """

    numerics: float | None
    k3: float | None
    total: float | None
    stale: float | None
    staleness: float | None
    unknown: int
    logs: int
    sources: Mapping[str, tuple[int, int]]


def parts(run: RunData) -> Parts | None:
    """Return the parts of a run's gap; None if its rollouts always come from the weights that score them."""
    logs = len(run.series(MARK)[0])
    if not logs:
        return None
    found = {name: pooled(run, name) for name in (f"{NUMERICS}{ABS_DIFF_MEAN}", f"{NUMERICS}k3_kl", "staleness_mean")}
    of = {name: pooled(run, name) for name in (ABS_DIFF_MEAN, f"stale/{ABS_DIFF_MEAN}")}
    return Parts(
        numerics=found[f"{NUMERICS}{ABS_DIFF_MEAN}"],
        k3=found[f"{NUMERICS}k3_kl"],
        total=of[ABS_DIFF_MEAN],
        stale=of[f"stale/{ABS_DIFF_MEAN}"],
        staleness=found["staleness_mean"],
        unknown=logs - len(run.series(f"{PREFIX}{NUMERICS}source")[0]),
        logs=logs,
        sources=_sources(run),
    )


def _sources(run: RunData) -> dict[str, tuple[int, int]]:
    """Return for each source how many of the logs kept in full took numerics from it, and on how many tokens."""
    found: dict[str, tuple[int, int]] = {}
    for record in run.steps:
        number, tokens = (record.metrics.get(f"{PREFIX}{NUMERICS}{name}") for name in ("source", "tokens"))
        if record.split == "train" and number is not None and tokens is not None:
            name = SOURCES[int(number) - 1]
            logs, before = found.get(name, (0, 0))
            found[name] = (logs + 1, before + int(tokens))
    return found


def said_of(known: Parts) -> str:
    """Say from which sources numerics is known: "numerics is known of 3 of 4 logs by ... in 1 (300 tokens), ..."."""
    by = [
        f"{SOURCE_LABELS[source]} in {known.sources[source][0]} ({known.sources[source][1]:,} tokens)"
        for source in SOURCES
        if source in known.sources
    ]
    text = f"numerics is known of {known.logs - known.unknown} of {known.logs} logs"
    last = sum(logs for logs, _ in known.sources.values())
    text += f", and of the last {last} by" if by and last < known.logs - known.unknown else " by" if by else ""
    return f"{text} {', '.join(by)}" if by else text


def figures(runs: Mapping[str, RunData]) -> tuple[Figure, ...]:
    """Plot numerics, the gap of stale tokens and their age; nothing if all rollouts come from the weights that score them."""
    found = {name: known for name, run in runs.items() if (known := parts(run)) is not None}
    if not found:
        return ()
    sources = "; ".join(
        said_of(known) if len(found) == 1 else f"{name}: {said_of(known)}" for name, known in found.items()
    )
    return present(
        over_steps(
            runs,
            "numerics",
            f"{PREFIX}{NUMERICS}{ABS_DIFF_MEAN}",
            "Numerics: mean |Δlogp| of tokens of one version",
            "mean |Δlogp| (nat)",
            f"What precision, kernels and routing make; a gap in the line is unknown, not 0. Here {sources}.",
            log=True,
        ),
        over_steps(
            runs,
            "stale",
            f"{PREFIX}stale/{ABS_DIFF_MEAN}",
            "Mean |Δlogp| of stale tokens",
            "mean |Δlogp| (nat)",
            "Numerics, and what training did to the policy since the tokens were sampled: drift, which a correction weighs.",
            log=True,
        ),
        over_steps(
            runs,
            "staleness",
            PREFIX + "staleness_mean",
            "Staleness",
            "weight updates",
            "Mean number of weight updates between sampling a token and scoring it.",
        ),
    )
