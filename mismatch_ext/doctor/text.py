"""A diagnosis as one table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mismatch_ext.doctor.causes import Remedy, remedy
from mismatch_ext.doctor.diagnose import STANDS_OUT, Diagnosis
from mismatch_ext.doctor.evidence import LEAST_TOKENS, ROUTES, Largest, Rung
from mismatch_ext.doctor.named import NamedCause, in_layer
from mismatch_ext.doctor.tokens import DOUBTFUL, SURE, TokensTest

STATUS = {"confirmed": "confirmed", "fits": "fits", "partly": "fits in part", "measured": "measured"}
"""How sure a cause is, in words: every status that a `NamedCause` may have."""
VERDICTS = {
    "clean": "Clean{upto}: what is left is rounding, and no cause on the list fits.",
    "explained": "Explained{upto}: the causes above and rounding make the gap.",
    "partly": "Partly explained: {unexplained:.1e} nats per token are neither the causes above nor rounding.",
    "unexplained": "Unexplained: {unexplained:.1e} nats per token are not rounding, and no cause on the list fits.",
    "other_trainer": "Not judged: --model scores {unexplained:.1e} nats per token apart from the log's trainer_logprobs, more "
    "than its rounding, so it is not the run's trainer: give the run's --temperature, --trainer-layout, --trainer-attention or "
    "--trainer-dtype, or the checkpoint that scored them.",
    "trainer_alone": "The log's trainer is off: the engine computes --model within rounding, and trainer_logprobs are "
    "{unexplained:.1e} nats per token from both. Look at the pass that scored them: temperature, attention mask, positions, "
    "prompt, dropout, adapter.",
}
# Parts of the largest gap are given in nats if one is more than so many times the gap.
SHOWN_SHARE = 1.5
# A choice: the share of the gap from which on replay is named beside a clean verdict.
WORTH_REPLAY = 0.1
CANCELS = {
    "reference": "no shares: the two parts cancel: the reference itself is off. Engine and trainer agree, and the float32 oracle "
    "of --model agrees with neither",
    "rounding": "no shares: the two parts cancel, because both sides round alike",
}
TOO_FEW = f"no shares below {LEAST_TOKENS:,} tokens: they would be wider than half of the gap"
CANNOT = (
    "not on the list: tensor parallelism, speculative decoding. A cause of the trainer's model looks like the engine's here; an "
    "error far below rounding's is not seen."
)


def report(diagnosis: Diagnosis) -> str:
    """Return the table, the line about the tokens, and the verdict."""
    return "\n".join(_lines(diagnosis))


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    gap = diagnosis.gap
    routes = (
        next((part.share for part in diagnosis.parts if part.name == ROUTES), None) if diagnosis.measurable else None
    )
    yield (
        f"gap {gap['logp_abs_diff_mean']:.2e} nats per token (k3 {gap['k3_kl']:.2e}, largest {gap['logp_abs_diff_max']:.2e}) on "
        f"{diagnosis.tokens:,} tokens of {diagnosis.responses} responses"
    )
    if diagnosis.tokens < LEAST_TOKENS:
        yield TOO_FEW
    if diagnosis.cancels:
        yield CANCELS[diagnosis.cancels]
    yield from ("", f"{'part of the gap':58} {'share':>14}  evidence")
    named = {cause.key: cause for cause in diagnosis.causes}
    for part in diagnosis.parts:
        share = "-" if part.share is None else f"{part.share:.0%} ({part.low:.0%} to {part.high:.0%})"
        cause = named.pop(part.name, None)
        label, evidence = (part.name, f"mean {part.mean:.1e}") if cause is None else (cause.said, _evidence(cause))
        yield f"{label:58} {share:>14}  {evidence}"
    yield from (f"{cause.said}: {_evidence(cause)}" for cause in named.values())
    if diagnosis.measurable:
        yield (
            f"in units of the trainer's own rounding: engine {diagnosis.ratio:.2f}, after the causes {diagnosis.left:.2f}, "
            f"trainer {diagnosis.trainer_ratio:.2f}"
        )
    if diagnosis.flips is not None:
        yield experts(*diagnosis.flips, diagnosis.most_flips)
    if diagnosis.largest is not None:
        yield _largest(diagnosis.largest)
    if diagnosis.rungs:
        yield from (
            "",
            f"{'the same tokens, computed otherwise':58} {'mean':>8} {'largest':>8} {'of gap':>7}  in float32",
        )
        yield from map(_rung, diagnosis.rungs)
    if diagnosis.blocks:
        yield from ("", f"{'block, on the engine-side input':32} {'engine':>8} {'rounding':>8} {'ratio':>6}")
        for block in diagnosis.blocks:
            yield f"{block.place:32} {block.error:8.1e} {block.own:8.1e} {block.ratio:6.1f}"
    yield from _advice(diagnosis, routes)
    yield from ("", _tokens(diagnosis.tokens_test, diagnosis.causes))
    yield from (f"seen: {note}" for note in diagnosis.notes)
    yield from (f"hint, not sure enough for a name: {hint}" for hint in diagnosis.hints)
    yield CANNOT
    out = [block for block in diagnosis.blocks if block.ratio >= STANDS_OUT]
    if out and diagnosis.verdict in ("partly", "unexplained"):
        most = max(out, key=lambda block: block.ratio)
        count = f"{len(out)} of {len(diagnosis.blocks)} blocks"
        yield f"where: {most.place}, {most.ratio:.1f} of rounding's; {count}"
    if diagnosis.begins is not None:
        yield f"where: begins at token {diagnosis.begins} of a response; before that it is rounding"
    if diagnosis.verdict == "clean" and abs(diagnosis.tokens_test.z) >= DOUBTFUL:
        yield "the verdict below is of log-probabilities alone: whether the tokens are the trainer's is not decided"
    yield conclusion(diagnosis.verdict, diagnosis.unexplained, diagnosis.seen, diagnosis.longest, routes)


def _advice(diagnosis: Diagnosis, routes: float | None) -> Iterator[str]:
    """Yield what to change; `routes` is their share of the gap."""
    for cause in diagnosis.causes:
        if lines := _changes(cause.remedy, diagnosis.hosts):
            yield from ("", f"to fix {cause.key}:", *lines)
    if diagnosis.verdict == "clean" and diagnosis.measurable:
        lower = remedy("dtype", engine_dtype=diagnosis.engine_dtype, trainer_dtype=diagnosis.trainer_dtype)
        if lower == Remedy():
            yield from ("", "both compute in float16 already")
        elif {"trl", "verl"} & set(diagnosis.hosts):
            yield from ("", "to lower rounding:", *_changes(lower, diagnosis.hosts))
        else:
            yield from ("", "to lower rounding: compute in float16, engine and trainer")
        if any(part.name == ROUTES for part in diagnosis.parts):
            of_gap = "" if routes is None else f", {routes:.0%} of the gap"
            yield from ("", f"to replay the engine's routes{of_gap}:", *_changes(remedy("routes"), diagnosis.hosts))


def experts(engine: float, rounding: float, most_flips: Sequence[float] | None) -> str:
    """Return the line about `Scores.flips` and `Scores.most_flips`."""
    return (
        f"experts: the engine chooses others than the trainer's router at {engine:.2%} of tokens and "
        f"layers{in_layer(most_flips)}; rounding alone makes {rounding:.2%}"
    )


def conclusion(verdict: str, unexplained: float, seen: int, longest: int, routes: float | None) -> str:
    """Return the last line: the verdict, bounded by how far responses were looked at; `routes` is their share of the gap."""
    if verdict == "unexplained" and unexplained == 0:
        return "Unexplained: tokens or blocks are not as rounding leaves them, and no cause on the list fits."
    upto = f" up to token {seen} of {longest}" if seen < longest else ""
    sentence = VERDICTS[verdict].format(unexplained=unexplained, upto=upto)
    if verdict == "clean" and routes is not None and routes >= WORTH_REPLAY:
        sentence += f" Replay (R3) would remove the routes' part, about {routes:.0%} of the gap."
    return sentence


def _changes(lines: Remedy, hosts: Sequence[str]) -> list[str]:
    return [f"  {host:7}{line}" for host in hosts if (line := getattr(lines, host))]


def _largest(largest: Largest) -> str:
    parts = [f"{name} {term / largest.gap:.0%}" for name, term in largest.parts.items()] if largest.gap else []
    if any(abs(term) > SHOWN_SHARE * abs(largest.gap) for term in largest.parts.values()):
        parts = [f"{name} {term:+.2e}" for name, term in largest.parts.items()]
    place = f"response {largest.response}, token {largest.token}"
    return f"largest gap, {largest.gap:+.2e} nats at {place}: {', '.join(parts) or 'none'}"


def _rung(rung: Rung) -> str:
    of_gap = "-" if rung.of_gap is None else f"{rung.of_gap:.0%}"
    policy = ", changes the policy" if rung.changes_the_policy else ""
    exact = "" if rung.float32 is None else f"{rung.float32:.1e}{policy}"
    return f"{rung.side + ', ' + rung.name:58} {rung.mean:8.1e} {rung.largest:8.1e} {of_gap:>7}  {exact}".rstrip()


def _evidence(cause: NamedCause) -> str:
    sure = "" if cause.z is None else f", z {cause.z:.0f}"
    slope = "" if cause.low is None or cause.high is None else f", slope {cause.low:.2f} to {cause.high:.2f}"
    ties = f"; as well as {', '.join(cause.ties)}" if cause.ties else ""
    status = "cause, confirmed" if cause.status == "confirmed" else STATUS[cause.status]
    return f"{status}{sure}{slope}{ties}"


def _tokens(test: TokensTest, named: Sequence[NamedCause]) -> str:
    z = f"(z {test.z:.1f})"
    if named and (test.truncated is None or any(cause.family == "sampling" for cause in named)):
        return f"tokens: held against the trainer's distribution alone, without the causes above {z}"
    if test.finding is not None:
        return f"tokens: {test.finding[2]} {z}"
    if abs(test.z) >= SURE:
        return f"tokens: not drawn from the trainer's distribution {z}"
    if abs(test.z) >= DOUBTFUL:
        return f"tokens: not decided whether they were drawn from the trainer's own distribution {z}"
    return f"tokens: drawn from the trainer's own distribution, as far as they tell {z}"
