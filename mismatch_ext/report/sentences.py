"""The verdict on one or several runs, in a few sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mismatch_ext.alarms import STALE_ABS_DIFF
from mismatch_ext.log_reading import RunData
from mismatch_ext.pooling import Parts
from mismatch_ext.report.doctor import Why
from mismatch_ext.report.findings import named_steps
from mismatch_ext.report.judging import RunVerdict
from mismatch_ext.report.levels import (
    CLEAR_RATIO,
    ELEVATED,
    HEALTHY_ABS_DIFF,
    LARGE,
    LEVELS,
    MIXED,
    SAME,
    SMALL,
    UNKNOWN,
    WARNED,
    WORDS,
    mean_of_k3,
)
from mismatch_ext.words import joined, quantity

DOCTOR = {
    "stock TRL": "mismatch-ext doctor --trl FILE --prompts FILE --out DIR",
    "stock verl": "mismatch-ext doctor --verl OVERRIDES --out DIR, with those of main_ppo",
}
"""The doctor's command, by who wrote a log without this package."""
OF_ROLLOUTS = "mismatch-ext doctor --model PATH --rollouts FILE --out DIR"
"""The doctor's command for a framework whose settings it does not read, though it reads the rollouts that it logs."""
ENDS = {"failed": "ended with an error", "interrupted": "was interrupted"}
TELL_APART = (
    "let rollouts be less stale, so that a batch has tokens of the weights that score it, "
    "before changing anything for that gap"
)
NO_PRECISION = (
    "what is left is drift, which no precision closes: let importance weights correct it, or let rollouts be less stale"
)
NOT_LOGGED = (
    "Neither mean |Δlogp| nor k3 was recorded, so nothing can be said about the two policies: below is what makes the trainer "
    "log them."
)
NOT_RECORDED = (
    "No mismatch metrics were recorded, so nothing can be said about the two policies: check that the run got past its first "
    "step with a `mismatch:` block."
)


def verdict(judged: Sequence[RunVerdict], runs: Mapping[str, RunData], why: Sequence[Why] = ()) -> str:
    """Say in a few sentences which runs agree, how large the gap is, what dominates it, and what to do."""
    measured = [v for v in judged if v.level in LEVELS]
    if not measured:
        return _nothing_measured(judged, runs)
    worst = max(measured, key=lambda v: (LEVELS.index(v.level), v.worst_mean or 0.0))
    comparable = [v for v in measured if _is_of_one_model(runs[v.run], runs[worst.run])]
    best = _best_alternative(comparable, worst)
    sentences = [
        _levels_clause(judged, worst),
        *_compared(worst, best),
        *_dominated(worst, judged),
        *(_in(v, judged, saved) for v in judged for saved in _saved_by_replay(v)),
        *(sentence for v in judged for sentence in _warned(v, judged)),
        *(f"{v.run} {ENDS[v.status]}" for v in judged if v.status in ENDS),
    ]
    then = ". What to do: " if len(sentences) > 1 else ": "
    return f"{'. '.join(sentences)}{then}{_advice(worst, best, judged)}.{_ask(runs[worst.run], worst, why)}"


def _nothing_measured(judged: Sequence[RunVerdict], runs: Mapping[str, RunData]) -> str:
    if any(v.level == MIXED for v in judged):
        return f"{_levels_clause(judged, judged[0])}: {TELL_APART}."
    first = NOT_LOGGED if all(run.is_host_log for run in runs.values()) else NOT_RECORDED
    warned = [f" {sentence}." for v in judged for sentence in _warned(v, judged)]
    return f"{first}{''.join(warned)}"


# How large the gaps are.


def _levels_clause(judged: Sequence[RunVerdict], worst: RunVerdict) -> str:
    """Say which runs have which level, with the figures of each."""
    clauses = []
    unit = "mean |Δlogp| "
    for level in (*LEVELS, MIXED, UNKNOWN):
        group = [v for v in judged if v.level == level]
        if not group:
            continue
        names = []
        for v in group:
            names.append(_with_figures(v, unit, detail=v is worst))
            if v.mean is not None:
                unit = ""  # is said once
        _, of_one, of_several = WORDS[level]
        clauses.append(f"{joined(names)} {of_one if len(group) == 1 else of_several}")
    return joined(clauses)


def _with_figures(v: RunVerdict, unit: str, *, detail: bool) -> str:
    """Return the name of a run with the size of its gap."""
    if v.parts is not None and v.parts.numerics is None and v.parts.total is not None:
        return f"{v.run} ({unit}{quantity(v.parts.total, 2)} of both)"
    without = f", without {named_steps(v.outliers)}" if v.outliers else ""
    if v.mean is None and v.k3 is None:
        return v.run
    if v.mean is None and v.k3 is not None:
        estimated = f"from which a mean |Δlogp| of {quantity(mean_of_k3(v.k3), 2)} is estimated"
        return f"{v.run} (k3 {quantity(v.k3, 2)}, {estimated}{without})"
    text = f"{unit}{quantity(v.mean, 2)}"
    if v.split != "train":
        text += f" on {v.split}"
    elif v.parts is not None:
        text += f" of numerics, {quantity(v.parts.total, 2)} with the drift of stale rollouts"
    if v.rounding is not None:
        text += f", {quantity(v.rounding, 2)} times this model's own rounding"
    if v.split == "train":
        text += without
    if detail and v.worst_split != v.split:
        text += f", {quantity(v.worst_mean, 2)} on {v.worst_split}"
    return f"{v.run} ({text})"


def _best_alternative(measured: Sequence[RunVerdict], worst: RunVerdict) -> RunVerdict | None:
    """Pick the other run with the smallest gap, if possible one in half precision: float32 is a reference, not a setting."""
    others = [v for v in measured if v is not worst and v.mean and not v.cause]
    half = [v for v in others if v.trainer_dtype in ("float16", "bfloat16")]
    return min(half or others, key=lambda v: v.mean or 0.0, default=None)


def _is_of_one_model(run: RunData, other: RunData) -> bool:
    """Tell whether two runs may be of the same model. Its path does not say so, and a log may not describe it."""
    here, there = run.header.get("run"), other.header.get("run")
    if not isinstance(here, dict) or not isinstance(there, dict):
        return True
    described = [key for key in ("model_type", "parameters") if key in here and key in there]
    return all(here[key] == there[key] for key in described)


def _compared(worst: RunVerdict, best: RunVerdict | None) -> list[str]:
    if best is None:
        return []
    ratio = (worst.mean or 0.0) / (best.mean or 1.0)
    if ratio < CLEAR_RATIO:
        return []
    return [f"{worst.run} is {quantity(ratio, 2)} times as far apart as {best.run}"]


# What else was seen.


def _dominated(worst: RunVerdict, judged: Sequence[RunVerdict]) -> list[str]:
    """Say that few tokens carry the gap of the worst run, if they do."""
    if worst.level == SAME or not worst.few_tokens:
        return []
    flips = ", as when experts flip" if worst.experts and not worst.replayed else ""
    return [_in(worst, judged, f"few tokens carry the gap{flips}")]


def _saved_by_replay(v: RunVerdict) -> list[str]:
    """Say what replay saves, and how many experts would be others without it, as far as either was measured."""
    facts = []
    if v.k3_without_replay is not None:
        without, with_replay = quantity(v.k3_without_replay, 2), quantity(v.k3_with_replay, 2)
        facts.append(f"without replay k3 is {without}, with it {with_replay}")
    if v.other_experts is not None:
        facts.append(f"the trainer's routers would choose other experts at {v.other_experts:.2%} of tokens and layers")
    return [", and ".join(facts)] if v.replayed and facts else []


def _warned(v: RunVerdict, judged: Sequence[RunVerdict]) -> list[str]:
    """Return a sentence for each warning, or one for all of a run that is one of several."""
    if len(judged) == 1:
        return [_capitalized(warning) for warning in v.warnings]
    return [f"In {v.run}, {'; '.join(v.warnings)}"] if v.warnings else []


def _in(v: RunVerdict, judged: Sequence[RunVerdict], fact: str) -> str:
    """Begin a sentence about one run, which is named if there are several."""
    return f"In {v.run} {fact}" if len(judged) > 1 else _capitalized(fact)


def _capitalized(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


# What to do.


def _advice(worst: RunVerdict, best: RunVerdict | None, judged: Sequence[RunVerdict]) -> str:
    causes: dict[str, list[str]] = {}
    for v in (worst, *(v for v in judged if v is not worst)):
        if v.cause:
            causes.setdefault(v.cause, []).append(v.run)
    if causes and len(judged) == 1:
        return "; ".join(causes)
    if causes:
        return "; ".join(f"in {joined(names)} {cause}" for cause, names in causes.items())
    if worst.level in (SAME, SMALL) and worst.parts is not None and _drifts(worst.parts):
        return NO_PRECISION
    if worst.level == SAME:
        return "nothing to do"
    if best is not None and _is_clearly_better(best, worst):
        return f"prefer {best.run}"
    if worst.level == LARGE and (worst.worst_mean or 0) >= STALE_ABS_DIFF:
        return "check weight sync, temperature and logprob mode before precision"
    if worst.level == SMALL:
        beyond = " beyond the one that is on" if worst.corrected else ""
        return f"no correction is needed{beyond}, keep watching it"
    if "bfloat16" in (worst.trainer_dtype, worst.engine_dtype):
        return "set mismatch.precision.dtype to float16"
    return "rounding alone does not explain it, so check routing, attention kernels and logprob mode"


def _is_clearly_better(best: RunVerdict, worst: RunVerdict) -> bool:
    is_small = LEVELS.index(best.level) <= LEVELS.index(SMALL)
    return is_small and (worst.mean or 0) >= CLEAR_RATIO * (best.mean or 0)


def _drifts(known: Parts) -> bool:
    """Tell whether the whole gap is larger than in healthy runs, and most of it is drift."""
    total = known.total or 0.0
    return total > HEALTHY_ABS_DIFF and total >= CLEAR_RATIO * (known.numerics or 0.0)


def _ask(run: RunData, worst: RunVerdict, why: Sequence[Why]) -> str:
    """Send the owner of a log without this package to the doctor, unless the gap is small or the doctor was asked."""
    if why or not run.is_host_log or worst.level not in (WARNED, ELEVATED, LARGE):
        return ""
    command = DOCTOR.get(run.header["run"]["host"], OF_ROLLOUTS)
    return f" To learn why: {command} (docs/doctor.md). What acts on it: docs/index.md, By symptom."
