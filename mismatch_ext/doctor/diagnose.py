"""Say why an engine and a trainer differ, from what is known of them: name the causes, and judge what they leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mismatch_ext.doctor.causes import HOSTS, Cause, remedy
from mismatch_ext.doctor.configs import quote, told_by
from mismatch_ext.doctor.evidence import (
    APART,
    ATTENTION,
    COARSER,
    DECODED,
    LAYOUT,
    LEAST_PART,
    LEAST_TOKENS,
    ROUTES,
    TRAINERS,
    Block,
    Cancels,
    Engine,
    Evidence,
    Largest,
    Part,
    Rung,
    Scores,
    Tried,
    begins,
    gather,
)
from mismatch_ext.doctor.fits import ROUNDING, SLOPES
from mismatch_ext.doctor.named import (
    FINER,
    NamedCause,
    name_attention,
    name_by_tokens,
    name_decode,
    name_fit,
    name_head,
    name_layout,
    name_measured,
    name_router,
    name_scaled_logits,
    name_trainer,
)
from mismatch_ext.doctor.sample import Floats, Sample
from mismatch_ext.doctor.tokens import SURE, TokensTest, judge_ends, judge_start
from mismatch_ext.gap import k3

SCHEMA = 1
# A named cause that leaves something is confirmed if it predicted at least this part of what the remedy mends. A remedy resets
# all settings of a kind together, so that it also mends what another of them did. Sampling is fitted by exact formulas; a model
# of an engine's rounding, such as of fp8, is not exact.
MOST, MOST_SAMPLED = 0.75, 0.9
# The trainer's error is rounding up to this size. On 14 clean runs (a dense model and one with experts; bfloat16, float16,
# float32; three seeds; temperatures 1 and 0.7) the trainer's was at most 1.22 and the engine's at most 1.14.
TRAINER_ROUNDING = 1.5
# Experts that differ are rounding up to so many times what rounding of this model flips, and up to this share in float32.
# On five clean runs (bfloat16, float16, float32) an engine flipped 0.8 to 1.2 times as many as rounding did.
FLIPS, FEW_FLIPS = 2.0, 0.002
# A block stands out if the engine's error is this many times the error of the trainer's block in the engine's dtype. Sound blocks
# reach 2.0: a kernel may round more often than the trainer's, as vLLM's bfloat16 attention does on a CPU without AVX-512.
STANDS_OUT = 3.0
# Families of causes that do not act when the engine scores the same tokens as a prompt: that score alone is their remedy.
SAMPLED = ("sampling", "reporting", "prompt")
# Nats. The distance is 0.08 for the shipped models with weights rounded to 3 bits, 0.02 for 4 bits, and 0.56 or 0.72 when one
# shipped model is taken for the other, although both were trained on the same task.
ANOTHER = 0.25
# Verdicts that leave something open.
OPEN = ("partly", "unexplained")


@dataclass(frozen=True, kw_only=True)
class Mended:
    """What remedies did on the same tokens: the part of the error that should have disappeared, and the part that did."""

    causes: tuple[str, ...]
    predicted: float
    measured: float
    slope: float
    left: float


@dataclass(kw_only=True)
class Diagnosis:
    """What the doctor found; `conclude` writes it."""

    tokens: int  # that were judged
    responses: int
    gap: dict[str, float]  # `logp_abs_diff_mean`, `k3_kl` and `logp_abs_diff_max` between engine and trainer
    parts: tuple[Part, ...]  # in the order of the path from engine to trainer
    # The engine's error in units of the trainer's own arithmetic: the larger of the ratios of medians and of means, and the
    # ratio of the largest hundredth.
    ratio: float
    tail_ratio: float
    trainer_ratio: float  # the trainer's error in the units of `ratio`
    measurable: bool  # whether rounding is larger than float32's own, so that the ratios mean something
    causes: tuple[NamedCause, ...]
    hints: tuple[str, ...]  # fits that are not sure enough to name a cause
    left: float  # `ratio` and `tail_ratio` of the error that the named causes leave
    left_tail: float
    unexplained: float  # mean size of the error that is neither named nor rounding, nats per token
    notes: tuple[str, ...]
    tokens_test: TokensTest
    verdict: str  # "clean", "explained", "partly", "unexplained" or "other_trainer"
    tried: tuple[str, ...]  # keys of all causes that were tried
    flips: tuple[float, float] | None = None  # `Scores.flips`
    most_flips: tuple[int, float] | None = None  # `Scores.most_flips`
    seen: int = 0  # tokens of the longest response that was judged
    longest: int = 0  # and of the longest that the run allows; 0 if unknown
    begins: int | None = None  # first token of a response from which on the error that is left lies; None if everywhere
    engine_dtype: str = ""
    trainer_dtype: str = ""
    mended: tuple[Mended, ...] = ()
    rungs: tuple[Rung, ...] = ()  # of each side
    largest: Largest | None = None
    blocks: tuple[Block, ...] = ()  # empty if that was not asked for, or not possible
    # Why parts that cancel have no shares: "reference" if they are beyond rounding, "rounding" if not, "" if none cancel.
    cancels: Cancels = ""
    hosts: tuple[str, ...] = HOSTS  # whose lines to change are said
    seconds: Mapping[str, float] = field(default_factory=dict)  # duration of each of the doctor's rungs, by name

    def exit_status(self, threshold: float) -> int:
        """Return 0 for a clean pair, 1 if at most `threshold` nats per token are unexplained, otherwise 3; 2 is an error."""
        if self.verdict == "clean":
            return 0
        if self.verdict == "other_trainer":
            return 3
        hidden = self.verdict == "unexplained" and self.unexplained == 0
        return 3 if self.verdict != "explained" and (hidden or self.unexplained > threshold) else 1

    def data(self) -> dict[str, Any]:
        """Return the diagnosis as JSON-able data."""
        data = {"schema": SCHEMA, **asdict(self)}
        data["tokens_test"]["finding"] = self.tokens_test.finding
        return data

    def for_hosts(self, hosts: tuple[str, ...]) -> Diagnosis:
        """Return the diagnosis with the lines to change of some hosts alone."""
        others = dict.fromkeys(set(HOSTS) - set(hosts), "")
        causes = tuple(replace(cause, remedy=replace(cause.remedy, **others)) for cause in self.causes)
        return replace(self, causes=causes, hosts=hosts)

    @property
    def mendable(self) -> tuple[NamedCause, ...]:
        """The causes that a remedy can confirm: those that predict the error of each token."""
        return tuple(cause for cause in self.causes if cause.slope is not None)


def diagnose(
    sample: Sample,
    scores: Scores,
    causes: Sequence[Cause] = (),
    *,
    engine: Engine | None = None,
    asked: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda key: None,
) -> Diagnosis:
    """Say why engine and trainer differ on a sample: `conclude` of what `gather` finds, which has the same arguments."""
    return conclude(gather(sample, scores, causes, engine=engine, asked=asked, seed=seed, progress=progress))


def conclude(evidence: Evidence) -> Diagnosis:
    """Say what the evidence shows. What later steps have added may confirm or refute what the sample alone says."""
    found = _of_sample(evidence)
    found.notes += tuple(evidence.notes)
    _judge_heads(found, evidence)
    _judge_model(found, evidence)
    for tried in evidence.remedies:
        judge_remedy(found, evidence, tried)
    _judge_request(found, evidence)
    _judge_blocks(found, evidence)
    _judge_later(found, evidence)
    _judge_run_pass(found, evidence)
    _judge_logged(found, evidence)
    _quote_configs(found, evidence)
    return found


def _of_sample(evidence: Evidence) -> Diagnosis:
    """Return what the sample alone shows."""
    sample, scores, noise = evidence.sample, evidence.scores, evidence.noise
    gap = sample.engine - scores.trainer
    mean_gap = float(np.abs(gap).mean())
    engine_rungs = () if evidence.engine is None else evidence.engine.rungs
    named = _named(evidence)
    verdict, unexplained = _verdict(evidence, named)
    complete = evidence.complete
    return Diagnosis(
        tokens=len(gap),
        responses=len(np.unique(sample.row)),
        gap={
            "logp_abs_diff_mean": mean_gap,
            "k3_kl": float(k3(torch.from_numpy(-gap)).mean()),
            "logp_abs_diff_max": float(np.abs(gap).max()),
        },
        parts=tuple(evidence.parts.values()),
        ratio=noise.size(evidence.explained.error),
        tail_ratio=noise.tail_ratio(evidence.explained.error),
        trainer_ratio=evidence.trainer_ratio,
        measurable=noise.measured,
        causes=tuple(named),
        hints=evidence.hints[:2],
        left=evidence.left,
        left_tail=evidence.reported.tail_ratio(evidence.explained.rest),
        unexplained=unexplained,
        notes=tuple(_notes(evidence, named)),
        tokens_test=evidence.tokens,
        verdict=verdict,
        tried=evidence.tried,
        flips=scores.flips,
        most_flips=scores.most_flips,
        seen=int(sample.place.max()) + 1,
        longest=evidence.longest,
        begins=None if complete else begins(sample.place, evidence.explained.rest, noise.mean, noise.exact),
        engine_dtype=scores.engine_dtype,
        trainer_dtype=scores.trainer_dtype,
        rungs=tuple(
            replace(rung, of_gap=rung.mean / mean_gap if mean_gap else None) for rung in (*scores.rungs, *engine_rungs)
        ),
        largest=_largest(sample, evidence.terms),
        cancels=evidence.cancels,
        seconds=evidence.seconds,
    )


def _named(evidence: Evidence) -> list[NamedCause]:
    """Return the causes that the sample shows: what fits, what the tokens tell, and what a side shows on its own."""
    fitted = evidence.explained.named
    named = [
        name_fit(fit, evidence.parts[fit.cause.key], evidence.complete, evidence.scores.temperature) for fit in fitted
    ]
    named += _told_by_tokens(evidence, named)
    named += _of_trainer(evidence, alone=not named)
    # Behind an error of arithmetic, or of a named cause, a router sees other hidden states and chooses otherwise for that reason.
    flips = evidence.scores.flips
    plain = evidence.complete and all(fit.cause.family in ("sampling", "reporting") for fit in fitted)
    if plain and flips is not None and flips[0] > max(FLIPS * flips[1], FEW_FLIPS):
        named.append(name_router(flips, evidence.scores.most_flips, evidence.parts.get(ROUTES)))
    if evidence.apart is not None:
        named.insert(0, name_decode(evidence.apart, evidence.parts.get(DECODED)))
    if late := judge_start(evidence.sample):
        tokens = "token" if late == 1 else "tokens"
        sentence = f"the mask starts {late} {tokens} late in every response: it leaves out what the engine sampled"
        named.append(name_measured("mask", "reporting", sentence, late, None))
    return named


def _told_by_tokens(evidence: Evidence, named: Sequence[NamedCause]) -> list[NamedCause]:
    """Return the cause that only the tokens show, where the log-probabilities agree or are from before the sampling settings."""
    tokens, temperature = evidence.tokens, evidence.scores.temperature
    if not evidence.complete:
        # The tokens come from another distribution in any case, whatever the cause.
        return []
    if not named:
        told = evidence.apart is None and tokens.finding is not None
        return [name_by_tokens(tokens, temperature)] if told else []
    # Reports from before the sampling settings do not cut off a tail.
    reports = {cause.family for cause in named} == {"reporting"}
    return [name_by_tokens(tokens, temperature)] if reports and tokens.truncated is not None else []


def _of_trainer(evidence: Evidence, *, alone: bool) -> list[NamedCause]:
    """Return the causes that the trainer's own passes show; which head computes finer only shows `alone`."""
    sample, scores, noise, terms, parts = (
        evidence.sample, evidence.scores, evidence.noise, evidence.terms, evidence.parts
    )  # fmt: skip
    named = []
    # `noise.measured` does not count here: it is false for a float32 engine, where a half-precision trainer makes the whole gap.
    if evidence.trainer_ratio > COARSER and parts[TRAINERS].mean > noise.exact:
        named.append(name_trainer(evidence.trainer_ratio, parts[TRAINERS], scores))
    if evidence.complete and alone and not named and scores.headed is not None and noise.measured:
        left, trainers, headed = (
            noise.ratio(errors)
            for errors in (evidence.explained.rest, terms[TRAINERS], scores.headed - evidence.oracle)
        )
        named += name_head(sample, scores, left, trainers, headed, parts)
    if scores.attended is not None:
        ratio = noise.size(terms[ATTENTION])
        if ratio > COARSER and parts[ATTENTION].mean > noise.exact:
            named.append(name_attention(sample, scores, ratio, parts[ATTENTION]))
    if scores.straight is not None:
        named += name_layout(scores, noise, terms[LAYOUT], parts[LAYOUT])
    return named


def _verdict(evidence: Evidence, named: Sequence[NamedCause]) -> tuple[str, float]:
    """Return the verdict, and how many nats per token are neither named nor rounding."""
    noise, rest, trainers = evidence.noise, evidence.explained.rest, evidence.parts[TRAINERS]
    mean_rest = float(np.abs(rest).mean())
    # Unless the trainer's error is rounding or has a name, the pair is not clean.
    exact = (
        evidence.trainer_ratio <= TRAINER_ROUNDING
        or trainers.mean <= noise.exact
        or any(cause.family == "trainer" for cause in named)
    )
    # What hits one token in a hundred moves neither median nor mean; of few tokens a hundredth is a single one.
    rare = (
        not named
        and len(rest) >= LEAST_TOKENS
        and mean_rest > noise.exact
        and evidence.reported.tail_ratio(rest) > APART
    )
    # Nor is it clean if the tokens come from another distribution than both sides report.
    drawn = bool(named) or abs(evidence.tokens.z) < SURE
    missing = 0.0 if evidence.complete else max(0.0, mean_rest - evidence.reported.mean)
    if not exact:
        missing = max(missing, trainers.mean - noise.mean)
    if evidence.complete and exact and not rare and drawn:
        return ("explained" if named else "clean"), missing
    return ("partly" if named else "unexplained"), missing


def _notes(evidence: Evidence, named: Sequence[NamedCause]) -> list[str]:
    scores, noise = evidence.scores, evidence.noise
    notes = []
    # Not beside a named cause, because a change of the logits also changes the size of rounding errors.
    finer = not named and noise.measured and evidence.left < FINER
    if finer and float(np.abs(evidence.explained.error).mean()) > noise.exact:
        notes.append(
            f"the engine errs {evidence.left:.2f} times as much as its dtype lets expect: it is finer than that"
        )
    dtypes = (scores.engine_dtype, scores.trainer_dtype)
    if "" not in dtypes and len(set(dtypes)) > 1:
        notes.append(
            f"the sides compute in different dtypes, the engine in {scores.engine_dtype} and the trainer in "
            f"{scores.trainer_dtype}: the coarser one's rounding is in the gap"
        )
    notes += judge_ends(evidence.sample, scores.end_tokens)
    notes += () if evidence.engine is None else evidence.engine.notes
    return notes


def _largest(sample: Sample, terms: Mapping[str, Floats]) -> Largest:
    gap = np.sum(list(terms.values()), axis=0)
    at = int(np.abs(gap).argmax())
    return Largest(
        response=int(sample.row[at]), token=int(sample.place[at]), gap=float(gap[at]),
        parts={name: float(term[at]) for name, term in terms.items()},
    )  # fmt: skip


def _judge_heads(found: Diagnosis, evidence: Evidence) -> None:
    """Note that one head alone computes in float32, and the gap that two heads alike leave.

    The cause "head_dtype" takes an error that is small enough; the note takes the dtypes that both sides say they have.
    """
    scores, engine_head = evidence.scores, evidence.engine_head
    named = any(cause.key == "head_dtype" for cause in found.causes)
    if named or engine_head is None or scores.headed is None or scores.trainer_dtype != scores.engine_dtype:
        return
    engine_is_exact, trainer_is_exact = engine_head == "float32", scores.trainer_head == "float32"
    if engine_is_exact == trainer_is_exact:
        return
    exact, other = ("engine", "trainer") if engine_is_exact else ("trainer", "engine")
    alike = scores.headed if engine_is_exact else scores.own
    now, then = (float(np.abs(evidence.sample.engine - side).mean()) for side in (scores.trainer, alike))
    note = (
        f"the {exact}'s head computes in float32 and the {other}'s does not: the gap is {now:.2e} nats per token, and {then:.2e} "
        "with a trainer whose head is like the engine's. mismatch.precision.head sets both"
    )
    found.notes += (note,)


def _judge_model(found: Diagnosis, evidence: Evidence) -> None:
    """Name another model if the engine's prefill is too far away for any rounding.

    Rounding, even of weights to 4 bits, moves logits by a small part of a nat. A listed cause that explains everything takes
    precedence. One that fits in part does not, because some cause may fit in part when two models resemble each other.
    """
    far = evidence.distance
    if far is None or far < ANOTHER or found.verdict not in OPEN:
        return
    cause = NamedCause(
        key="other_model", family="weights", parameter=far, status="fits", remedy=remedy("other_model"),
        said=f"the engine does not hold this model: half of its logits are off by {far:.2g} nats or more",
    )  # fmt: skip
    _rename_parts(found, {other.key: f"{other.key}, which fits in part" for other in found.causes})
    found.causes, found.verdict, found.unexplained = (cause,), "explained", 0.0


def _rename_parts(found: Diagnosis, names: Mapping[str, str]) -> None:
    found.parts = tuple(replace(part, name=names.get(part.name, part.name)) for part in found.parts)


def judge_remedy(found: Diagnosis, evidence: Evidence, tried: Tried) -> None:
    """Confirm or refute the causes whose remedies were tried.

    A cause is confirmed if the error fell to the size of rounding, and fell token by token as the cause predicts. A cause
    that left something must also have predicted most of the fall, because the remedy of its family mends more than it.
    """
    keys = [cause.key for cause in found.mendable if cause.family in tried.families]
    if not keys:
        return
    error, noise = evidence.explained.error, evidence.noise
    prediction = sum((fit.finite for fit in evidence.explained.named if fit.cause.key in keys), np.zeros_like(error))
    gap, before = float(np.abs(tried.after).mean()), max(float(np.abs(error).mean()), 1e-300)
    predicted, fell = 1 - float(np.abs(error - prediction).mean()) / before, 1 - gap / before
    slope = noise.slope(error - tried.after, prediction)
    mended = tried.left <= ROUNDING or gap <= noise.exact
    sampled = set(tried.families) <= set(SAMPLED)
    whole = found.verdict != "partly" or predicted >= (MOST_SAMPLED if sampled else MOST) * fell
    found.notes += (
        f"after the remedy of {', '.join(keys)}: the engine's error is {gap:.1e} nats per token, {tried.left:.2f} of rounding's; "
        f"it fell by {fell:.0%}, {predicted:.0%} were predicted (slope {slope:.2f})",
    )
    if not mended or not SLOPES[0] <= slope <= SLOPES[1]:
        missing = gap - noise.mean if not mended else abs(fell - predicted) * before
        still_scaled = SLOPES[0] <= noise.slope(tried.after, prediction) <= SLOPES[1]
        _refute(found, keys, fell, predicted, missing, still_scaled=still_scaled)
    elif not whole:
        _add_to_note(
            found, "; the remedy mends more than the named cause: another setting of its kind differs too, or instead"
        )
        found.unexplained = max(found.unexplained, (fell - predicted) * before)
    else:
        _confirm(found, keys)
    done = Mended(causes=tuple(keys), predicted=predicted, measured=fell, slope=slope, left=tried.left)
    found.mended += (done,)


def _add_to_note(found: Diagnosis, words: str) -> None:
    found.notes = (*found.notes[:-1], found.notes[-1] + words)


def _confirm(found: Diagnosis, keys: Sequence[str]) -> None:
    found.causes = tuple(replace(cause, status="confirmed") if cause.key in keys else cause for cause in found.causes)
    # Reports from before the sampling settings do not cut off a tail.
    if found.tokens_test.truncated is not None and {cause.family for cause in found.causes} == {"reporting"}:
        found.causes += (name_by_tokens(found.tokens_test, 1.0),)
    if found.verdict == "partly":
        # The remedy also removed what the fit left, for example routes that changed because of the fault.
        found.verdict, found.unexplained = "explained", 0.0


def _refute(
    found: Diagnosis, keys: Sequence[str], fell: float, predicted: float, missing: float, *, still_scaled: bool
) -> None:
    """Take "explained" back after a remedy that leaves an error, or that did not do what was predicted."""
    _add_to_note(found, "; that does not confirm it")
    # If an error like that of a temperature remains without sampling, which alone has one, the logits are scaled.
    if keys == ["temperature"] and still_scaled:
        _add_to_note(found, ": the engine's score of a prompt shows it too, and has no temperature")
        found.causes = tuple(name_scaled_logits(cause) if cause.key in keys else cause for cause in found.causes)
        _rename_parts(found, {"temperature": "logit_scale"})
        if found.largest is not None:
            scaled = {"logit_scale" if name in keys else name: size for name, size in found.largest.parts.items()}
            found.largest = replace(found.largest, parts=scaled)
        return
    found.unexplained = max(found.unexplained, missing)
    found.verdict = "partly"
    if fell >= LEAST_PART * predicted:
        found.causes = tuple(replace(cause, status="partly") if cause.key in keys else cause for cause in found.causes)
        return
    # What was predicted did not happen, so that nothing of it stays a name.
    refuted = f"refuted: its remedy took {fell:.0%} of {predicted:.0%}"
    hints = [f"{cause.said} ({refuted})" for cause in found.causes if cause.key in keys]
    found.hints = (*hints, *found.hints)
    found.causes = tuple(cause for cause in found.causes if cause.key not in keys)
    found.verdict = "partly" if found.causes else "unexplained"
    _rename_parts(found, {key: f"like {key}, which is refuted" for key in keys})


def _judge_request(found: Diagnosis, evidence: Evidence) -> None:
    """Note which half of the engine's side differs, by its error on the same prompts."""
    if evidence.prompt is None or found.verdict not in OPEN:
        return
    left, error = evidence.prompt
    exact = float(np.abs(error).mean()) <= evidence.noise.exact
    if half := request_or_engine(left, found.ratio, exact=exact):
        found.notes += (f"where: scored as a prompt, the engine is at {left:.2f} of rounding's: {half}",)


def request_or_engine(left: float, ratio: float, *, exact: bool) -> str:
    """Return which half differs, by the engine's error as a prompt and as sampled; "" if two sizes of rounding do not say."""
    if left > ROUNDING and not exact:
        return "its weights, configuration or arithmetic differ, whatever is asked of it"
    if exact or left**2 - 1 <= LEAST_PART * max(0.0, ratio**2 - 1):
        return "its weights, configuration and cache are sound, and prompts, sampling or what it reports differ"
    return ""


def _judge_blocks(found: Diagnosis, evidence: Evidence) -> None:
    """Add the comparison block by block; a block that stands out is no clean pair."""
    found.blocks = tuple(evidence.blocks)
    if found.verdict == "clean" and any(block.ratio >= STANDS_OUT for block in found.blocks):
        found.verdict = "unexplained"


def _judge_later(found: Diagnosis, evidence: Evidence) -> None:
    """Look beyond the sample, at a few responses of the run's whole length."""
    later = evidence.later
    if later is None or found.verdict != "clean":
        return
    behind = later.place >= found.seen
    if not behind.any():
        return
    rounding = float(later.rounding.mean())
    late_error = float(later.engine[behind].mean())
    if late_error > max(APART * rounding, later.exact):
        first = begins(later.place, later.engine, rounding, later.exact)
        found.verdict, found.unexplained = "unexplained", late_error
        found.begins = found.seen if first is None else first
        note = f"{int(behind.sum())} tokens beyond token {found.seen}: the engine errs {late_error:.1e} nats per token"
        found.notes += (note,)
    found.seen = int(later.place.max()) + 1


def _judge_run_pass(found: Diagnosis, evidence: Evidence) -> None:
    """Say what a run's own pass does otherwise, where that pass differs beyond rounding."""
    run, at = evidence.run_pass, next((at for at, cause in enumerate(found.causes) if cause.key == "layout"), None)
    if run is None or at is None:
        return
    causes = list(found.causes)
    if run.dropout:
        causes[at] = replace(causes[at], key="dropout", said=run.dropout, remedy=remedy("dropout"))
        found.causes = tuple(causes)
        return
    before = float(np.abs(run.computed - run.plain).mean())
    left = {what: float(np.abs(run.computed - tried).mean()) for what, (_, tried) in run.tries.items()}
    best = min(left, key=left.__getitem__, default=None)
    if best is not None and left[best] <= (1 - LEAST_PART) * before:
        by = f"{left[best]:.1e}, not by {before:.1e}"
        sentence = f"the run's own pass is one with {best}: against such a pass it differs by {by}"
        causes[at] = replace(causes[at], said=sentence, remedy=remedy(run.tries[best][0]))
        found.causes = tuple(causes)
        return
    found.notes += (
        f"not shown in the run's own pass, by trying: {', '.join(left)}; masks, kernels and adapters were not tried",
    )
    found.verdict, found.unexplained = "partly", max(found.unexplained, before)


def _judge_logged(found: Diagnosis, evidence: Evidence) -> None:
    """Give no verdict if the scored trainer is not the one whose log-probabilities a log holds."""
    logged = evidence.logged
    if logged is None:
        return
    found.notes += (logged.said,)
    if not logged.other:
        return
    # What fits a gap to another trainer is no cause in the run.
    _rename_parts(found, {cause.key: f"like {cause.key}, not judged" for cause in found.causes})
    found.verdict, found.unexplained, found.causes, found.hints = "other_trainer", logged.far, (), ()


def _quote_configs(found: Diagnosis, evidence: Evidence) -> None:
    """Let causes quote both configurations, so that the reader can tell which side is at fault."""
    configs = evidence.configs
    if configs is None:
        return
    named = [cause.key for cause in found.causes]
    found.causes = tuple(replace(cause, said=quote(cause.key, cause.said, configs)) for cause in found.causes)
    found.notes += tuple(told_by(named, configs))
