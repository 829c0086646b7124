"""Proves after each weight update that the engine computes with the trainer's weights.

Both sides score fixed probe tokens: the trainer, and the engine by prefill. The engine also decodes a few tokens, which
its own prefill then scores. Each check compares scores of the engine with a reference: prefill with the trainer, decode
with prefill. Both remember the same things (`History`) and look at the same evidence, strongest first. N sequences, T
tokens.

1. A score of the engine is not finite: garbled. Rounding cannot make one from finite weights.
2. Prefill only: tensors that both sides hold under one name and layout (embeddings, norms) are compared bit by bit
   after rounding to the engine's dtype. A tensor that differs but equals the trainer's previous version is stale,
   because that does not happen by chance. Any other difference is stale if rule 3 or 4 holds, or if the engine's scores
   have not changed in a bit although the trainer's weights have; otherwise it is garbled. The same holds if these tensors
   are equal, and the output head does not compute with the weights that it holds; the message then names the head. A packed
   copy of it was not made again, as happens to heads that are tied to the embeddings.
3. The engine's scores have not changed in a bit while the reference moved by more than the movement floor: stale.
   Movement is counted from when the engine's scores last changed, so that small steps add up.
4. The engine's scores are nearer than half the gap to an older reference that lies beyond the movement floor: stale.
   Unlike rule 3, this also catches engines whose numerics are not reproducible. Decoded tokens are compared as far as
   they agree with the older ones, because a token's score depends on the tokens before it.
5. The gap exceeds `max(FACTOR * baseline, floor)`, or the ceiling: garbled, or stale if the engine's scores have not
   changed in a bit although the trainer's weights have. The baseline is this model's own gap between two sides with the
   same weights: the smaller of the gap before the first update and the gap after it. The gap before is wrong if the
   trainer's model is not the one on disk, the gap after if the first update garbles. Rounding errors grow with the
   logits, so the baseline grows with the spread of the reference. The baseline of decode is at most that of prefill:
   two passes of one engine differ by no more than two engines do, and a decode that was wrong from the start must not
   be its own measure.
6. A gap beyond rule 5's limit is "apart", not garbled, if the baseline is at least half of it, and engine and trainer
   differ token by token as they did before the first update: since the look before, the difference has changed by less
   than half the gap, or by less than the reference has moved. This rule holds until the sides have agreed once.

The trainer is compared with prefill, which computes each sequence anew. If captured graphs, packed copies of weights or
a prefix cache are stale, prefill is still right, and only decode is wrong. Gaps are means without the largest hundredth
of the probes, and of decode without the largest tenth: a token that took another expert in one of the two passes is no
sign of wrong weights, which move more tokens. Where two experts are nearly equal, this happens in float32 too. Each
sequence's first sampled token is left out, because the pass over the prompt computed it. Seeds and prompts are the same
each time.

The floors and ceilings come from measured gaps (one vLLM, seven models, dense and MoE, same weights): float32 1e-7 to
7e-6, float16 9e-5 to 2e-2, bfloat16 7e-4 to 0.2. The floor is one unit in the last place of a log-probability of size 1
for the half dtypes, and 14 times the largest gap for float32; the ceilings are far above the largest gap. Within one
dtype the gaps of models differ by a factor of 200, so each model has a baseline of its own instead of one threshold.
The errors to be caught: an update that left MoE weights unpacked, 1.1e-2 on a model with gaps of 1e-7 (float32) to 8e-4
(bfloat16); a sleep mode that loses weights, 0.201 after 0.015 (bfloat16). Both exceed the factor of 10.

Known limits: a change of the weights that moves the probes by less than the movement floor cannot be told from numerics
by log-probabilities. Rule 3 sees such changes once they have added up; until then only the comparison of tensors sees
them. A copy for decode that is stale in part, such as one expert's, passes until it moves enough tokens. Code that runs
only for other shapes, such as graphs captured for larger batches, is not tested.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from mismatch_ext.config import MonitorConfig
from mismatch_ext.errors import (
    ConfigError,
    EngineError,
    MismatchError,
    NonFiniteLogprobError,
    RecordError,
    WeightSyncError,
)
from mismatch_ext.events import SYNC_UNANSWERED, WEIGHT_SYNC, WEIGHTS_MOVING, WEIGHTS_STILL
from mismatch_ext.precision.dtypes import canonical, coarser
from mismatch_ext.states import from_json, state, to_json

NamedTensors = Iterable[tuple[str, Tensor]]
Rows = list[list[float]]
Status = Literal["in_sync", "unchanged", "stale", "garbled", "apart", "stale_decode"]

FACTOR = 10.0
FLOOR = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 8e-3}
CEILING = {"float32": 1e-3, "float16": 0.2, "bfloat16": 1.0}
# Every step changes some bit of float32 weights, so in float32 even a small movement should have reached the engine.
MOVEMENT_FLOOR = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}
HISTORY = 8
LEFT_OUT, LEFT_OUT_DECODED = 0.01, 0.1
"""Means over probes and over decoded tokens leave out these shares of them: those that differ most."""
COMPARABLE = 0.25
"""Decoded tokens are compared with older ones if at least this share of them is the same."""

# Choices: enough positions for the rules above, and 256 tokens are scored in one batch.
PROBES, PROBE_LENGTH, DECODE_TOKENS = 8, 32, 8
STILL = 3
"""Updates in a row that sent the same weights, after which a run is told: one is usual at a start, and float16 may skip steps."""
UNTRAINED = (
    "no parameter of the optimizer is trainable, so no update can change the weights. Set requires_grad where you want to train; "
    "with peft, load the adapter with is_trainable=True."
)


def untrained(parameters: Iterable[Tensor]) -> str | None:
    """Return `UNTRAINED` if none of an optimizer's parameters is trainable; None if one is, or if it holds none at the moment."""
    trainable = [parameter.requires_grad for parameter in parameters]
    # DeepSpeed's ZeRO-3 takes the parameters out of its optimizer between steps.
    return UNTRAINED if trainable and not any(trainable) else None


OUTPUT_HEAD = "output head"
"""Name of the comparison of what the engine's output head computes with the weights that the head holds."""

REMEDIES = {
    "stale": "The update did not reach the weights that the engine computes with: check that the weights are sent after each "
    "optimizer step, that the engine reloads its packed or captured copies, that it was awake, and that its prefix cache was "
    "reset.",
    "garbled": "Weights arrived, but wrong: check names and layouts (fused, packed or expert weights that the engine must repack "
    "after an update), casts on the way, and truncated transfers.",
    "apart": "Check that the trainer's model is the checkpoint that the engine loaded, and that both sides have the same model "
    "configuration and attention; `mismatch-ext doctor` names the cause.",
    "stale_decode": "The engine's decode path does not compute with the weights that its prefill has. Captured graphs and packed "
    "copies of weights have to be made again after each update, and the prefix cache to be reset: let it run without captured "
    "graphs (enforce_eager), and check that whatever updates its weights resets the cache.",
    OUTPUT_HEAD: "The engine keeps a packed or converted copy of its output head, which has to be made again after each update. "
    "A head that is tied to the embeddings has no tensor of its own in an update, so this is easy to miss. In vLLM on a CPU, "
    "call lm_head.quant_method.process_weights_after_loading(lm_head), as mismatch_ext.adapters.vllm.update_weights does.",
    "stale_cache": "The prefix cache holds keys and values of older weights: reset it after each update (in vLLM "
    "LLM.reset_prefix_cache, or POST /reset_prefix_cache).",
    "decodes_nan": "Its prefill's are: an engine that has computed with NaN may still read it from its KV cache. Start the run "
    "again, or the engine.",
}


RECENT, MOST_DOUBTED = 10, 3
"""Of so many last updates so many doubtful ones fail, as two in a row do: an engine may miss every second update. A choice."""
ASKED_AGAIN = (
    "One such update ends nothing: the next one is checked. "
    f"Two in a row fail, and so do {MOST_DOUBTED} of the last {RECENT}."
)


def doubted_too_often(doubted: Sequence[bool]) -> bool:
    """Tell whether of the last `RECENT` updates, the latest one last, enough were bad that no doubt is left."""
    two_in_a_row = all(doubted[-2:]) and len(doubted) > 1
    return two_in_a_row or sum(doubted) >= MOST_DOUBTED


def unanswered(error: EngineError) -> str:
    """Return what is said of a weight update after which an engine did not answer."""
    return f"nothing is known of this weight update: {error}"


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """A tensor that both sides hold in one layout, compared after rounding to the engine's dtype; None is unknown."""

    name: str
    equal: bool
    max_abs_diff: float | None
    matches_previous: bool | None = None
    """Whether the engine's tensor equals the trainer's before this update."""


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Tokens `[N, P+L]` that an engine sampled at temperature 1 after N prompts, and their log-probabilities `[N, L]`, nats."""

    tokens: Tensor
    logprobs: Tensor


@dataclass(frozen=True, kw_only=True)
class SyncVerdict:
    """Judgment of one weight update; gaps are means over the probes, nats per token, infinite if a score is not finite.

    A gap above `threshold` counts as garbled; `baseline` is that between two sides with the same weights. `movement` is the mean
    change of the trainer's probes since the engine's last changed. "apart" are sides that differ as they did before any update.
    "stale_decode" is a prefill in sync, and a decode that is not.
    """

    status: Status
    gap_mean: float
    gap_max: float
    baseline: float
    threshold: float
    movement: float
    message: str
    clear: bool = False
    """Whether it is bad beyond doubt: a tensor is bit by bit that of before the update, or the gap is more than ten times what
    the update moved, and than this model's rounding."""

    @property
    def ok(self) -> bool:
        """Whether the engine computes with the trainer's weights, as far as can be seen."""
        return self.status in ("in_sync", "unchanged")


# What a check remembers, and what it sees.


@state
class Version:
    """The reference's scores of one look `[N, T]`, and the tokens if the engine chose them."""

    reference: Rows
    tokens: list[list[int]] | None = None


@state
class Apart:
    """Two sides that have not agreed since before the first update."""

    gap: float
    """Mean gap before the first update."""
    engine: Rows
    """The engine's scores at the latest look."""
    reference: Rows
    """The reference's."""


@state
class History:
    """What a check remembers of earlier updates."""

    baseline: tuple[float, float] | None = None
    """Smallest gap of two sides with the same weights, and the spread of the reference then."""
    updates: int = 0
    engine: Rows | None = None
    """The engine's scores."""
    since: Version | None = None
    """The reference when the engine's scores last changed."""
    versions: tuple[Version, ...] = ()
    """The first reference, which an engine that never got an update stays near, and the latest few."""
    apart: Apart | None = None
    """The gap before the first update, until one look is within the limits; None if there was no look before it."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Scores of one look `[N, T]` as tensors, float64 on the CPU; tokens if the engine chose them."""

    engine: Tensor
    reference: Tensor
    tokens: Tensor | None = None
    left_out: float = 0.0

    @cached_property
    def gap(self) -> float:
        """Mean difference of engine and reference; infinity if a score is not finite."""
        return self.mean(self.engine - self.reference)

    @property
    def largest(self) -> float:
        """Largest difference of engine and reference; infinity if a score is not finite."""
        return float((self.engine - self.reference).abs().max()) if math.isfinite(self.gap) else math.inf

    @property
    def spread(self) -> float:
        """Standard deviation of the reference."""
        return float(self.reference.std(correction=0))

    def mean(self, difference: Tensor) -> float:
        """Return the mean absolute difference without the share that is left out; infinity if one is not finite."""
        sizes = difference.abs().flatten()
        if not bool(torch.isfinite(sizes).all()):
            return math.inf
        if self.left_out:
            sizes = sizes.sort().values[: len(sizes) - int(self.left_out * len(sizes))]
        return float(sizes.mean())

    def movement(self, version: Version, where: Tensor | None = None) -> float:
        """Return how far the reference is from an older one."""
        difference = self.reference - torch.tensor(version.reference, dtype=torch.float64)
        return self.mean(difference if where is None else difference[where])

    def common(self, version: Version) -> Tensor:
        """Return True where a token and all tokens before it are those of an older version `[N, T]`."""
        if self.tokens is None:
            return torch.ones_like(self.engine, dtype=torch.bool)
        return (self.tokens == torch.tensor(version.tokens)).long().cumprod(1).bool()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a check allows."""

    dtype: str
    """The coarser compute dtype of the two that are compared."""
    baseline: float = math.inf
    """The baseline is at most this."""
    noise: float = 1.0
    """How many baselines the scores of one version differ by."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One look beside the history."""

    gap: float
    baseline: float
    threshold: float
    frozen: bool
    """Whether the engine's scores have not changed in a bit."""
    movement: float
    """Mean change of the reference since the engine's scores last changed; 0 if they just did."""
    moved: bool
    """Whether the engine's scores are the same while the reference moved by more than the movement floor."""
    older: float | None
    """Distance to the nearest older version, if it is so small that the engine must hold that version."""


def with_baseline(history: History, now: Look) -> History:
    """Take the gap of a look as the baseline if it is the smallest so far."""
    if math.isfinite(now.gap) and (history.baseline is None or now.gap < history.baseline[0]):
        return replace(history, baseline=(now.gap, now.spread))
    return history


def begin_history(history: History, now: Look) -> History:
    """Take a look before the first update, when the engine holds the weights that training starts from."""
    apart = None
    if math.isfinite(now.gap):
        apart = Apart(gap=now.gap, engine=now.engine.tolist(), reference=now.reference.tolist())
    history = replace(with_baseline(history, now), engine=None, since=None, versions=(), apart=apart)
    return add_look(history, now, frozen=False, new=math.isfinite(now.gap))


def limit_of_rounding(baseline: float, dtype: str) -> float:
    """Return up to which gap two sides differ by rounding, nats, if `baseline` is what they differ by with the same weights."""
    return min(max(FACTOR * baseline, FLOOR[dtype]), CEILING[dtype])


def evidence_of(history: History, now: Look, limits: Limits) -> Evidence:
    """Compare a look with the history."""
    gap, spread = history.baseline or (math.inf, 0.0)
    if spread > 0:
        gap *= max(1.0, now.spread / spread)
    baseline = min(gap, limits.baseline)
    floor = max(MOVEMENT_FLOOR[limits.dtype], limits.noise * baseline)
    movement, frozen = 0.0, False
    if history.engine is not None and history.since is not None:
        frozen = now.engine.tolist() == history.engine and bool(now.common(history.since).all())
        movement = now.movement(history.since) if frozen else 0.0
    distances = []
    for version in history.versions:
        common = now.common(version)
        if common.double().mean() < COMPARABLE or now.movement(version, common) <= floor:
            continue
        distance = now.mean((now.engine - torch.tensor(version.reference, dtype=torch.float64))[common])
        if distance < now.mean((now.engine - now.reference)[common]) / 2:
            distances.append(distance)
    return Evidence(
        gap=now.gap,
        baseline=baseline,
        threshold=limit_of_rounding(baseline, limits.dtype),
        frozen=frozen,
        movement=movement,
        moved=frozen and movement > floor,
        older=min(distances, default=None),
    )


def add_look(history: History, now: Look, *, frozen: bool, new: bool) -> History:
    """Add a look to the history: as the last change of the engine unless it is frozen, as a version of the reference if `new`."""
    if not new and (frozen or math.isinf(now.gap)):
        return history
    version = Version(reference=now.reference.tolist(), tokens=None if now.tokens is None else now.tokens.tolist())
    if not frozen and math.isfinite(now.gap):
        history = replace(history, engine=now.engine.tolist(), since=version)
    if new:
        history = replace(history, versions=history.versions[:1] + (*history.versions[1:], version)[-HISTORY:])
    return history


def judge(history: History, now: Look, limits: Limits, *, changed: bool) -> tuple[History, Evidence]:
    """Compare the look after an update with the history, and return the history with it.

    `changed` says whether the weights differ from those of the update before.
    """
    if not history.updates or history.baseline is None:
        history = with_baseline(history, now)
    seen = evidence_of(history, now, limits)
    history = add_look(history, now, frozen=seen.frozen, new=changed or not history.versions)
    return replace(history, updates=history.updates + 1, apart=_still_apart(history.apart, now, seen)), seen


# Prefill.


def judge_prefill(
    history: History, now: Look, limits: Limits, *, changed: bool, comparisons: Sequence[TensorComparison] = ()
) -> tuple[History, SyncVerdict]:
    """Judge one update by the engine's prefill; `changed` says whether the trainer's weights differ from those before."""
    before = history
    history, seen = judge(before, now, limits, changed=changed)
    status, why = _prefill_status(before, now, seen, changed, comparisons)
    remedy = REMEDIES.get(OUTPUT_HEAD if only_the_head_differs(comparisons) else status, "")
    figures = (
        f"Mean gap on the probes {seen.gap:.3g}, largest {now.largest:.3g}; {limits.dtype} baseline {seen.baseline:.3g}, "
        f"threshold {seen.threshold:.3g}."
    )
    message = f"weight update {history.updates}: {status}. {why} {figures} {remedy}"
    return history, _verdict(status, now, seen, message.rstrip())


def only_the_head_differs(comparisons: Sequence[TensorComparison]) -> bool:
    """Tell whether the output head computes with other weights than it holds, while all compared tensors are the trainer's."""
    return [comparison.name for comparison in comparisons if not comparison.equal] == [OUTPUT_HEAD]


def _differ_as_before(apart: Apart | None, now: Look, seen: Evidence) -> bool:
    """Apply rule 6 to sides that have not agreed so far; False if nobody looked before the first update."""
    if apart is None or math.isinf(seen.gap) or seen.baseline < seen.gap / 2:
        return False
    reference_change = now.reference - torch.tensor(apart.reference, dtype=torch.float64)
    engine_change = now.engine - torch.tensor(apart.engine, dtype=torch.float64)
    return now.mean(engine_change - reference_change) < max(seen.gap / 2, now.mean(reference_change))


def _still_apart(apart: Apart | None, now: Look, seen: Evidence) -> Apart | None:
    """Return what a history keeps of sides that were apart before the first update; None once they have agreed."""
    if apart is None or seen.gap <= seen.threshold:
        return None
    if not _differ_as_before(apart, now, seen):
        return apart
    return replace(apart, engine=now.engine.tolist(), reference=now.reference.tolist())


def _verdict(status: Status, now: Look, seen: Evidence, message: str) -> SyncVerdict:
    return SyncVerdict(
        status=status,
        gap_mean=seen.gap,
        gap_max=now.largest,
        baseline=seen.baseline,
        threshold=seen.threshold,
        movement=seen.movement,
        message=message,
    )


def _prefill_status(
    history: History, now: Look, seen: Evidence, changed: bool, comparisons: Sequence[TensorComparison]
) -> tuple[Status, str]:
    """Apply the rules at the top of the file in their order."""
    if not math.isfinite(seen.gap):
        count = int((~torch.isfinite(now.engine)).sum())
        return "garbled", f"{count} of {now.engine.numel()} engine log-probabilities are not finite."
    stale = ""
    if seen.moved:
        stale = f"The trainer's log-probabilities moved by {seen.movement:.3g}, the engine's did not change at all."
    elif seen.older is not None:
        stale = f"The engine is at {seen.older:.3g} from the probes of an older trainer version."
    elif seen.frozen and changed:
        stale = "The trainer's weights changed, the engine's log-probabilities did not change at all."
    tensors = [comparison for comparison in comparisons if comparison.name != OUTPUT_HEAD]
    if only_the_head_differs(comparisons):
        text = "The output head does not compute with the weights that it holds"
        if tensors:
            text += f"; {len(tensors)} other tensors are the trainer's bit by bit"
        return "stale" if stale else "garbled", f"{text}. {stale}".rstrip()
    differing = [comparison for comparison in tensors if not comparison.equal]
    if differing:
        previous = [comparison.name for comparison in differing if comparison.matches_previous]
        if previous:
            stale = f"{len(previous)} are the trainer's previous version, such as {previous[0]}."
        largest = max(differing, key=_size)
        size = "" if largest.max_abs_diff is None else f" by {largest.max_abs_diff:.3g}"
        text = f"{len(differing)} of {len(tensors)} tensors differ from the trainer's, such as {largest.name}{size}."
        return "stale" if stale else "garbled", f"{text} {stale}".rstrip()
    if seen.moved or seen.older is not None:
        return "stale", stale
    exact = f", {len(tensors)} tensors are equal bit by bit" if tensors else ""
    if seen.gap > seen.threshold:
        if stale:
            return "stale", stale
        if history.apart is not None and _differ_as_before(history.apart, now, seen):
            before = f"The sides were {history.apart.gap:.3g} apart before any update"
            return "apart", f"{before}, and differ token by token as they did then{exact}."
        return "garbled", f"The weights are neither the trainer's nor an older version's{exact}.{_unseen(history)}"
    if not changed:
        return "unchanged", "The trainer's weights are those of the previous update."
    return "in_sync", f"The gap of prefill is within numerics{exact}."


def _size(comparison: TensorComparison) -> float:
    """Return by how much a tensor differs, to find the worst: infinitely with a NaN, 0 where it is not known."""
    size = comparison.max_abs_diff or 0.0
    return math.inf if math.isnan(size) else size


def _unseen(history: History) -> str:
    """Say that nobody looked before the first update, if that is so: sides that never agreed then look garbled."""
    if history.updates or history.versions:
        return ""
    return " Nobody compared the sides before this first update, so they may also have differed from the start."


# Decode.


def decode_look(decoded: Decoded, prefill: Tensor) -> Look:
    """Return decoded tokens beside prefill's scores of them `[N, L]`, without each row's first token."""
    count = decoded.logprobs.shape[1]
    sampled = decoded.tokens[:, decoded.tokens.shape[1] - count :]
    if not (sampled.shape == decoded.logprobs.shape == prefill.shape) or count < 2:
        raise RecordError(
            f"decoded tokens {tuple(sampled.shape)}, their log-probabilities {tuple(decoded.logprobs.shape)} and prefill's "
            f"{tuple(prefill.shape)}; allowed: the same shape, at least two tokens per sequence."
        )
    engine, reference = (x.detach().to("cpu", torch.float64)[:, 1:] for x in (decoded.logprobs, prefill))
    return Look(engine=engine, reference=reference, tokens=sampled.detach().cpu()[:, 1:], left_out=LEFT_OUT_DECODED)


def judge_decode(history: History, now: Look, limits: Limits, *, changed: bool) -> tuple[History, SyncVerdict]:
    """Judge the decode after one update; arguments as for `judge`."""
    history, seen = judge(history, now, limits, changed=changed)
    why, remedy = "", "stale_decode"
    if math.isinf(seen.gap):
        why, remedy = "Log-probabilities of decoded tokens are not finite.", "decodes_nan"
    elif seen.moved:
        why = f"Decoded tokens did not change at all, while prefill's scores of them moved by {seen.movement:.3g}."
    elif seen.older is not None:
        why = f"The engine decodes at {seen.older:.3g} from its prefill before an earlier update."
    elif seen.gap > seen.threshold:
        why = "The engine's decode differs from its prefill of the same tokens."
    figures = (
        f"Mean gap between decode and prefill {seen.gap:.3g}, {limits.dtype} noise {seen.baseline:.3g}, threshold "
        f"{seen.threshold:.3g} ({now.engine.numel()} tokens)."
    )
    if not why:
        return history, _verdict("in_sync", now, seen, f"The engine decodes as its prefill scores. {figures}")
    return history, _verdict("stale_decode", now, seen, f"{why} {figures} {REMEDIES[remedy]}")


# Both sides, asked after each update.


class ProbedTrainer(Protocol):
    """The methods that are called on the trainer."""

    def score(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities `[N, T-1]` at temperature 1, in nats, of all but the first of tokens `[N, T]` (int64)."""

    def fingerprint(self) -> str:
        """Return a digest of the current weights, which changes when the weights change."""


class ProbedEngine(Protocol):
    """The methods that are called on the engine."""

    def score(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities `[N, T-1]` that prefill gives, as the trainer's `score` does, in float64."""

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Decode `count` tokens after each prompt `[N, P]` at temperature 1, beyond end tokens; the same weights give the same.

        The engine's random numbers are not drawn.
        """

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Compare samples of the tensors just sent, and of those sent before, with the engine's; empty if they cannot be read."""


@dataclass(frozen=True, kw_only=True)
class TrainerLook:
    """The trainer's weights at one moment: log-probabilities of the probes `[N, T-1]`, and a digest."""

    logprobs: Tensor
    fingerprint: str


@state
class VerifierState:
    """What a checkpoint holds of a verifier: the dtypes of both checks, their histories, and which updates were bad lately."""

    dtypes: tuple[str, str]
    prefill: History = field(default_factory=History)
    decode: History = field(default_factory=History)
    doubted: tuple[bool, ...] = ()
    """Of each of the last `RECENT` updates, whether it was bad; the latest one is last."""


def draw_probes(vocabulary: Tensor, longest: int | None = None) -> Tensor:
    """Draw probe sequences `[N, T]` from ids `[V]`, int64, the same in every run; all ids are equally likely, also rare ones."""
    length = PROBE_LENGTH if longest is None else min(PROBE_LENGTH, longest)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(vocabulary), (PROBES, length), generator=generator)
    return vocabulary[rows.to(vocabulary.device)]


@runtime_checkable
class DecodesAfresh(Protocol):
    """An engine that can pass its prefix cache by."""

    def decode_afresh(self, tokens: Tensor, count: int) -> Decoded:
        """Decode as `decode` does, without reading keys and values of prompts from the prefix cache."""


class WeightVerifier:
    """Verifies every weight update of one engine: both sides score the same probe tokens.

        verifier = WeightVerifier(trainer, engine, monitor, draw_probes(vocabulary), dtype="bfloat16")
        verifier.begin()                      # the engine holds the weights that training starts from
        ...                                   # an optimizer step; the weights are sent
        verdict = verifier.verify()

    Args:
        trainer: The trainer.
        rollout: The engine.
        monitor: The `monitor` section; `weight_sync` says what a bad verdict leads to.
        probes: Probe tokens `[N, T]`, int64.
        dtype: The engine's compute dtype.
        trainer_dtype: The trainer's compute dtype; None if it is the engine's or finer. The coarser of the two sets the
            limits, because it sets the gap.
        event: Called with level, name and message when an update went wrong; None writes nothing.
        name: The engine's name in that message, when there are several engines.
        decode_tokens: The engine decodes this many tokens instead of each probe's last ones, and they are compared with
            its prefill; 0 for none. Captured graphs, packed copies and caches with old weights show there alone.

    Attributes:
        decoded: Number of tokens that the engine decodes after each prompt.
        verdict: The last verdict; None before the first.
        state: What a checkpoint holds.

    Raises:
        PrecisionError: A name is not a compute dtype.
        ConfigError: The engine has no `decode`, and `decode_tokens` is not 0.
    """

    def __init__(
        self,
        trainer: ProbedTrainer,
        rollout: ProbedEngine,
        monitor: MonitorConfig,
        probes: Tensor,
        *,
        dtype: str | torch.dtype,
        trainer_dtype: str | torch.dtype | None = None,
        event: Callable[[str, str, str], None] | None = None,
        name: str = "",
        decode_tokens: int = DECODE_TOKENS,
    ) -> None:
        self.trainer, self.rollout, self.monitor, self.probes = trainer, rollout, monitor, probes
        engine = canonical(dtype)
        self.state = VerifierState(dtypes=(coarser(engine, engine if trainer_dtype is None else trainer_dtype), engine))
        self.decoded = min(decode_tokens, probes.shape[1] - 1)
        self.verdict: SyncVerdict | None = None
        self.unanswered = 0
        self._event, self._name = event, name
        self._fingerprint: str | None = None
        self._still = 0
        self._before: Mapping[str, Any] = {}
        if self.decoded and not callable(getattr(rollout, "decode", None)):
            raise ConfigError(
                f"mismatch.monitor.weight_sync={monitor.weight_sync!r}: {type(rollout).__name__} cannot be asked to decode; give "
                "it the method `decode` of mismatch_ext.sides.RolloutSide, or set weight_sync to 'off'."
            )

    @property
    def begun(self) -> bool:
        """Whether a baseline or an update is known, by which the next update can be judged."""
        return bool(self.state.prefill.versions)

    @property
    def prompts(self) -> Tensor:
        """Prompts `[N, P]` after which the engine decodes: the probes without their last `decoded` tokens."""
        return self.probes[:, : self.probes.shape[1] - self.decoded]

    def begin(self) -> None:
        """Note the gap before the first update, while the engine holds the weights that training starts from.

        Do not call this if the engine's weights are random until the first update. The first update's gap is then the only
        baseline, and garbled weights go unnoticed up to the ceiling. Raises as `judge`.
        """
        look = self.look()  # first: ranks that share the weights look together, and one rank's engine may fail
        engine, decode = self._ask()
        state = replace(self.state, prefill=begin_history(self.state.prefill, self._look(engine, look.logprobs)))
        self.state = state if decode is None else replace(state, decode=begin_history(state.decode, decode))
        self._fingerprint = look.fingerprint

    def look(self) -> TrainerLook:
        """Ask only the trainer; when the sides take turns on a device, pass the result to `verify` once the engine is awake."""
        return TrainerLook(fingerprint=self.trainer.fingerprint(), logprobs=self.trainer.score(self.probes))

    def moved(self) -> bool:
        """Tell whether the trainer's weights differ from those at the last verdict."""
        return self.trainer.fingerprint() != self._fingerprint

    def judge(self, sent: Mapping[str, Any] | None = None, look: TrainerLook | None = None) -> SyncVerdict:
        """Judge whether the engine holds the trainer's present weights, whoever sent them; a bad verdict is only returned.

        `sent` are samples of the tensors that the last update sent, for the engine's `compare`; `look` is what `look` returned
        for the present weights. Raises RecordError if the sides' answers differ in shape, NonFiniteLogprobError if the
        trainer's are not finite.
        """
        sent = {} if sent is None else sent
        look = self.look() if look is None else look  # first, as in `begin`
        changed, before = look.fingerprint != self._fingerprint, self._before
        # Noted first: an engine that does not answer has got these weights all the same.
        self._before, self._fingerprint = sent, look.fingerprint
        engine, decode_now = self._ask()
        comparisons = self.rollout.compare(sent, before)
        dtype, engine_dtype = self.state.dtypes
        now = self._look(engine, look.logprobs)
        moved = now.movement(self.state.prefill.versions[-1]) if self.state.prefill.versions else 0.0
        prefill, verdict = judge_prefill(
            self.state.prefill, now, Limits(dtype=dtype), changed=changed, comparisons=comparisons
        )
        self.state = replace(self.state, prefill=prefill)
        gap, explained = verdict.gap_mean, FACTOR * max(moved, verdict.baseline)
        if decode_now is not None:
            # Two passes of prefill, each with its own noise, differ by less than two baselines.
            limits = Limits(dtype=engine_dtype, baseline=verdict.baseline, noise=2)
            decode, of_decode = judge_decode(self.state.decode, decode_now, limits, changed=changed)
            self.state = replace(self.state, decode=decode)
            if verdict.ok and not of_decode.ok:  # if prefill is wrong too, that is the cause to name
                verdict = replace(verdict, status=of_decode.status, message=self._by_cache(of_decode))
                # Decode and prefill are two passes over the same weights, so that an update's size explains nothing.
                gap, explained = of_decode.gap_mean, 0.0
        missed = any(
            comparison.matches_previous and not comparison.equal
            for comparison in comparisons
            if comparison.name != OUTPUT_HEAD
        )
        self.verdict = replace(verdict, clear=not verdict.ok and (missed or gap > explained))
        return self.verdict

    def verify(
        self, sent: Mapping[str, Any] | None = None, look: TrainerLook | None = None, *, stepped: bool = True
    ) -> SyncVerdict | None:
        """Judge the last update as `judge` does; if it is bad, write an event, and raise WeightSyncError unless that is to warn.

        A bad verdict that is not clear is a warning, and the next update is judged again: two in a row raise, and so do
        `MOST_DOUBTED` of the last `RECENT` updates. An engine that does not answer says nothing about its weights: that is a
        warning, and the verdict is None. Weights that stand still are an event, too, unless no optimizer has `stepped` since
        the last update.
        """
        try:
            verdict = self.judge(sent, look)
        except EngineError as error:
            self.verdict = None
            self.unanswered += 1
            self._say("warning", SYNC_UNANSWERED, unanswered(error))
            return None
        self.unanswered = 0
        doubted = (*self.state.doubted, not verdict.ok)[-RECENT:]
        self.state = replace(self.state, doubted=doubted)
        if not verdict.ok:
            confirmed = verdict.clear or doubted_too_often(doubted)
            if confirmed:
                self._say("error", WEIGHT_SYNC, verdict.message)
            else:
                self._say("warning", WEIGHT_SYNC, f"{verdict.message} {ASKED_AGAIN}")
            if confirmed and self.monitor.weight_sync != "warn":
                raise WeightSyncError(verdict.message)
        if verdict.status != "unchanged" and self._still >= STILL and self._event is not None:
            self._event("info", WEIGHTS_MOVING, "weight updates send other weights again.")
        self._still = self._still + stepped if verdict.status == "unchanged" else 0
        if stepped and self._still == STILL:
            self._say(
                "warning",
                WEIGHTS_STILL,
                f"the last {STILL} weight updates sent the same weights: the optimizer moves nothing. Its rate is 0, it has "
                "no trainable parameter, no gradient reaches the weights, every advantage is 0, or float16 skips every step.",
            )
        return verdict

    def leave_unknown(self, sent: Mapping[str, Any], look: TrainerLook) -> None:
        """Note an update of which nothing is known, since an engine has not answered; the next one is judged as ever."""
        self._before, self._fingerprint, self.verdict = sent, look.fingerprint, None
        self.unanswered += 1

    def _say(self, level: str, name: str, message: str) -> None:
        """Write an event, with the engine's name where there are several."""
        if self._event is not None:
            self._event(level, name, f"{self._name}: {message}" if self._name else message)

    def _ask(self) -> tuple[Tensor, Look | None]:
        """Return prefill's scores of the probes, and the decoded tokens with prefill's scores of them."""
        count = self.decoded
        if count == 0:
            return self._scored(self.probes), None
        # Decode before anything is scored, so that decoding meets whatever a cache still holds for these prompts.
        decoded = self.rollout.decode(self.prompts, count)
        if not isinstance(decoded, Decoded):
            raise RecordError(f"{self._side}.decode returned a {type(decoded).__name__}; it must return a Decoded.")
        rows, length = self.probes.shape
        shapes = tuple(decoded.tokens.shape), tuple(decoded.logprobs.shape)
        if shapes != ((rows, length), (rows, count)):
            raise RecordError(
                f"{self._side}.decode returned tokens {shapes[0]} and logprobs {shapes[1]}; allowed: tokens {(rows, length)}, "
                f"the {length - count} of the prompt with {count} sampled ones, and logprobs {(rows, count)}."
            )
        scores = self._scored(torch.cat([self.probes, decoded.tokens.to(self.probes.device)]))
        return scores[: len(self.probes)], decode_look(decoded, scores[len(self.probes) :, -count:])

    def _by_cache(self, verdict: SyncVerdict) -> str:
        """Return the message of a decode that differs from prefill, with the prefix cache for its cause if that alone does it."""
        if not isinstance(self.rollout, DecodesAfresh) or not math.isfinite(verdict.gap_mean):
            return verdict.message
        try:
            decoded = self.rollout.decode_afresh(self.prompts, self.decoded)
            scores = self._scored(decoded.tokens.to(self.probes.device))
        except MismatchError:  # what has been measured stands, whether or not its cause can be named
            return verdict.message
        gap = decode_look(decoded, scores[:, -self.decoded :]).gap
        if gap > min(verdict.threshold, verdict.gap_mean / 2):
            return verdict.message
        return (
            f"The engine's decode differs from its prefill by {verdict.gap_mean:.3g} nats per token, and by {gap:.3g} past its "
            f"prefix cache. {REMEDIES['stale_cache']}"
        )

    @property
    def _side(self) -> str:
        return type(self.rollout).__name__

    def _scored(self, tokens: Tensor) -> Tensor:
        """Return prefill's scores of tokens, of the shape that they must have."""
        scores, shape = self.rollout.score(tokens), (len(tokens), tokens.shape[1] - 1)
        if tuple(getattr(scores, "shape", ())) != shape:
            raise RecordError(
                f"{self._side}.score returned {_described(scores)}; allowed: a tensor {shape}, a log-probability of each token "
                "but the first."
            )
        return scores

    def _look(self, engine: Tensor, trainer: Tensor) -> Look:
        shape = (len(self.probes), self.probes.shape[1] - 1)
        if tuple(trainer.shape) != shape:
            raise RecordError(f"{type(self.trainer).__name__}.score returned {tuple(trainer.shape)}; allowed: {shape}.")
        engine, trainer = (x.detach().to("cpu", torch.float64, copy=True) for x in (engine, trainer))
        bad = (~torch.isfinite(trainer)).nonzero()
        if len(bad):
            place = tuple(int(i) for i in bad[0])
            raise NonFiniteLogprobError(
                f"the trainer's log-probability of probe {place} (row, position) is {float(trainer[place])}; its own forward "
                "pass is broken, so the engine's weights cannot be judged."
            )
        return Look(engine=engine, reference=trainer, left_out=LEFT_OUT)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run continues from, as JSON-able data."""
        return to_json(self.state)

    def load_state_dict(self, saved: Mapping[str, Any]) -> str | None:
        """Continue from a saved state, or return a sentence that says why the check begins anew: its settings differ."""
        state = from_json(VerifierState, saved, "weight_sync")
        if not state.prefill.versions:
            return None  # a run that verified nothing left this state
        shapes = [
            [len(rows := v.reference), len(rows[0])] for v in (*state.prefill.versions[:1], *state.decode.versions[:1])
        ]
        present = [[len(self.probes), self.probes.shape[1] - 1], [len(self.probes), self.decoded - 1]]
        if state.dtypes != self.state.dtypes:
            changed = f"it was kept for {' and '.join(state.dtypes)}, and the sides compute in {' and '.join(self.state.dtypes)}"
        elif shapes != present[: len(shapes)]:
            changed = f"it was kept of probes and decoded tokens {shapes}, and there are {present}"
        else:
            self.state = state
            return None
        return f"the check of weight updates begins anew: {changed}."


def _described(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


# Sums of bits, modulo 2^64: integer sums do not depend on their order, so equal weights have equal sums on all devices.


BitSums = tuple[int, int, int]
"""Number of elements, the sum of their bits, and that sum weighted by position."""
Shape = tuple[int, ...]
FINGERPRINT_SAMPLES = 1 << 16
SAMPLED_ROWS = 1024
"""About this many rows of a tensor enter the sums by which two sides are compared."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 64


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stretch of a tensor that a process holds: its elements, flat, from index `start` on of a tensor of this shape."""

    values: Tensor
    start: int
    shape: Shape


def fingerprint(named_tensors: NamedTensors) -> str:
    """Return a digest of named weights, or of this rank's shards, to tell whether they changed.

    It contains names, shapes, dtypes and sums of bits: of all elements if there are fewer than 131,072, otherwise of 43,000 to
    88,000 at a regular stride. An optimizer step changes nearly all elements, and cannot be missed.
    """
    digest = hashlib.blake2b(digest_size=16)
    sums: dict[torch.device, list[Tensor]] = {}
    for name, tensor in named_tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}\n".encode())
        flat = local.detach().reshape(-1)
        # The stride is odd, so that it visits all columns of a matrix whose width is a power of two.
        sampled = flat[:: (flat.numel() // FINGERPRINT_SAMPLES) | 1]
        sums.setdefault(flat.device, []).append(_bit_sums(sampled, torch.arange(len(sampled), device=flat.device)))
    for device in sorted(sums, key=str):
        # One transfer per device, not one per tensor.
        digest.update(torch.stack(sums[device]).cpu().numpy().tobytes())
    return digest.hexdigest()


def sums_of(piece: Piece, dtype: torch.dtype) -> BitSums:
    """Add up the bits of a piece of a tensor after rounding to the engine's dtype; the sums of all pieces are the tensor's."""
    rows, columns = _sampled(piece.shape)
    start, end, device = piece.start, piece.start + piece.values.numel(), piece.values.device
    stretches = [(max(row * columns, start), min((row + 1) * columns, end)) for row in rows]
    stretches = [(first, last) for first, last in stretches if first < last]
    if not stretches:
        return 0, 0, 0
    values = torch.cat([piece.values[first - start : last - start] for first, last in stretches])
    places = torch.cat([torch.arange(first, last, device=device) for first, last in stretches])
    plain, weighted = _bit_sums(values.detach().to(dtype), places).tolist()
    return len(places), plain % _MODULUS, weighted % _MODULUS


def added(parts: Iterable[Mapping[str, BitSums]]) -> dict[str, BitSums]:
    """Add up the sums of several processes, by name."""
    total: dict[str, BitSums] = {}
    for sums in parts:
        for name, (count, plain, weighted) in sums.items():
            before = total.get(name, (0, 0, 0))
            total[name] = (before[0] + count, (before[1] + plain) % _MODULUS, (before[2] + weighted) % _MODULUS)
    return total


def compare_sums(
    engine: Mapping[str, BitSums],
    sent: Mapping[str, BitSums],
    before: Mapping[str, BitSums],
    shapes: Mapping[str, Shape],
) -> list[TensorComparison]:
    """Compare tensors that each side holds whole, once or several times, by their sums, and by those of the update before."""
    compared = []
    for name in sent:
        if name not in engine or name not in shapes:
            continue
        rows, columns = _sampled(shapes[name])
        elements = len(rows) * columns
        if not elements or not all(sums[name][0] and sums[name][0] % elements == 0 for sums in (engine, sent)):
            continue
        equal = _equal(engine[name], sent[name], elements)
        compared.append(
            TensorComparison(
                name=name,
                equal=equal,
                max_abs_diff=0.0 if equal else None,
                matches_previous=_equal(engine[name], before[name], elements) if name in before else None,
            )
        )
    return compared


@torch.no_grad()
def _bit_sums(values: Tensor, places: Tensor) -> Tensor:
    """Return the sum of the bits of values `[n]`, and that sum weighted by place `[2]`, int64 modulo 2^64."""
    values = values.contiguous()
    bits = values.view(_BITS[values.element_size()]).to(torch.int64)
    return torch.stack([bits.sum(), (bits * (2 * places + 1)).sum()])  # an odd weight loses no bit


def _sampled(shape: Shape) -> tuple[range, int]:
    """Return the rows of a tensor that enter the sums, and its number of columns; a vector is one row."""
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    return range(0, rows, max(1, rows // SAMPLED_ROWS)), columns


def _equal(sums: BitSums, others: BitSums, elements: int) -> bool:
    """Whether two tensors, each held as often as its count says, are the same."""
    copies, other_copies = sums[0] // elements, others[0] // elements
    return all((a * other_copies - b * copies) % _MODULUS == 0 for a, b in zip(sums[1:], others[1:], strict=True))


def in_parts(tensors: NamedTensors, most: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield tensors in order, in parts of at most `most` bytes; a larger tensor is a part of its own."""
    part: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if part and sum(x.nbytes for _, x in part) + tensor.nbytes > most:
            yield part
            part = []
        part.append((name, tensor))
    if part:
        yield part
