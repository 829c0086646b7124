"""A diagnosis as one table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from mismatch_ext.doctor.diagnosis import Diagnosis, NamedCause
from mismatch_ext.doctor.remedies import HOSTS, remedy
from mismatch_ext.doctor.rungs import Rung
from mismatch_ext.doctor.split import LEAST_TOKENS
from mismatch_ext.doctor.tokens import said

STATUS = {"confirmed": "confirmed", "fits": "fits", "partly": "fits in part", "measured": "measured"}
"""How sure a cause is, in words: every status that a `NamedCause` may have."""
VERDICTS = {
    "clean": "Clean: what is left is rounding, and no cause on the list fits.",
    "explained": "Explained: the causes above and rounding make the gap.",
    "partly": "Partly explained: {unexplained:.1e} nats per token are neither the causes above nor rounding.",
    "unexplained": "Unexplained: {unexplained:.1e} nats per token are not rounding, and no cause on the list fits.",
}
CANNOT = (
    "not on the list: tensor parallelism, speculative decoding. A cause of the trainer's model looks like the engine's here; an "
    "error far below rounding's is not seen."
)


def report(found: Diagnosis) -> str:
    """Return the table, the line about the tokens, and the verdict."""
    return "\n".join(_lines(found))


def _lines(found: Diagnosis) -> Iterator[str]:
    gap = found.gap
    yield (
        f"gap {gap['logp_abs_diff_mean']:.2e} nats per token (k3 {gap['k3_kl']:.2e}, largest {gap['logp_abs_diff_max']:.2e}) on "
        f"{found.tokens:,} tokens of {found.responses} responses"
    )
    if found.tokens < LEAST_TOKENS:
        yield f"no shares below {LEAST_TOKENS:,} tokens: they would be wider than half of the gap"
    yield ""
    yield f"{'part of the gap':58} {'share':>14}  evidence"
    named = {cause.key: cause for cause in found.causes}
    for part in found.parts:
        share = "-" if part.share is None else f"{part.share:.0%} ({part.low:.0%} to {part.high:.0%})"
        cause = named.pop(part.name, None)
        yield f"{part.name if cause is None else cause.said:58} {share:>14}  " + (
            f"mean {part.mean:.1e}" if cause is None else _evidence(cause)
        )
    for cause in named.values():
        yield f"{cause.said}: {_evidence(cause)}"
    if found.measurable:
        yield (
            f"in units of the trainer's own rounding: engine {found.ratio:.2f}, after the causes {found.left:.2f}, "
            f"trainer {found.trainer_ratio:.2f}"
        )
    if found.largest is not None:
        yield found.largest.said()
    if found.rungs:
        yield ""
        yield f"{'the same tokens, computed otherwise':58} {'mean':>8} {'largest':>8} {'of gap':>7}  in float32"
        yield from map(_rung, found.rungs)
    if found.blocks:
        yield ""
        yield f"{'block, on the engine-side input':32} {'engine':>8} {'rounding':>8} {'ratio':>6}"
        for block in found.blocks:
            name = f"layer {block.layer}, {block.kind}"
            yield f"{name:32} {block.error:8.1e} {block.own:8.1e} {block.ratio:6.1f}"
    for cause in found.causes:
        yield ""
        yield f"to mend {cause.key}:"
        yield from (f"  {host:7}{line}" for host in HOSTS if (line := getattr(cause.remedy, host)))
    if found.verdict == "clean" and found.measurable:
        lower = remedy("rounding", engine_dtype=found.engine_dtype, trainer_dtype=found.trainer_dtype)
        yield ""
        yield "to lower rounding:" if any(getattr(lower, host) for host in HOSTS) else "both compute in float16 already"
        yield from (f"  {host:7}{line}" for host in HOSTS if (line := getattr(lower, host)))
        if any(part.name == "routes" for part in found.parts):
            yield from (f"  {host:7}{line}" for host in HOSTS if (line := getattr(remedy("routes"), host)))
    yield ""
    yield said(found.tokens_test, [cause.key for cause in found.causes])
    yield from (f"seen: {note}" for note in found.notes)
    yield from (f"hint, not sure enough for a name: {hint}" for hint in found.hints)
    yield CANNOT
    if found.verdict == "unexplained" and found.unexplained == 0:
        yield "Unexplained: the tokens, or a few of the errors, are not as rounding leaves them, and no cause on the list fits."
    else:
        yield VERDICTS[found.verdict].format(unexplained=found.unexplained)


def _rung(rung: Rung) -> str:
    of_gap = "-" if rung.of_gap is None else f"{rung.of_gap:.0%}"
    exact = (
        "" if rung.float32 is None else f"{rung.float32:.1e}{', changes the policy' if rung.changes_the_policy else ''}"
    )
    return f"{rung.side + ', ' + rung.name:58} {rung.mean:8.1e} {rung.largest:8.1e} {of_gap:>7}  {exact}".rstrip()


def _evidence(cause: NamedCause) -> str:
    sure = "" if cause.z is None else f", z {cause.z:.0f}"
    slope = "" if cause.low is None or cause.high is None else f", slope {cause.low:.2f} to {cause.high:.2f}"
    ties = f"; as well as {', '.join(cause.ties)}" if cause.ties else ""
    status = "cause, confirmed" if cause.status == "confirmed" else STATUS[cause.status]
    return f"{status}{sure}{slope}{ties}"
