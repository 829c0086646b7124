"""What verl's driver measures of a batch: the gap, its parts by version, lengths, and the KL to the reference.

verl's driver fetches the same fields of the whole batch for its own metrics. This module fetches `CHUNK` rows at a time from
verl's TransferQueue, so that its memory does not grow with the batch.

Shapes: B rows of a chunk, T tokens of its longest response, R tokens of its responses one after the other, without padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from mismatch_ext.adapters.verl.bad_rows import FAULT, reason_of
from mismatch_ext.adapters.verl.loss import BASELINE, WEIGHTS, sampled_by
from mismatch_ext.adapters.verl.rollout.client import FIELD as VERSIONS
from tensordict import TensorDict
from torch import Tensor
from verl.workers.utils.padding import response_from_nested, response_to_nested

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.config import KlConfig
from mismatch_ext.drift import drift_sums, of_one_version, token_versions
from mismatch_ext.errors import RecordError
from mismatch_ext.events import BAD_ROW_REASONS
from mismatch_ext.gap import MEANS_OF, gap_sums, rows_of_means
from mismatch_ext.kl import kl_baseline, kl_sums
from mismatch_ext.sums import Sums, merged

CHUNK = 64
"""Rows that are fetched at a time; a larger group of answers to one prompt is fetched whole for its baseline."""
OLD, SCORED, ROLLOUT, REFERENCE = "old_log_probs", "log_probs", "rollout_log_probs", "ref_log_prob"
MASK, EXTRA = "response_mask", "extra_fields"
SIDES = {ROLLOUT: "engine", REFERENCE: "reference"}
"""Whose log-probabilities a field holds, for messages; all other fields are the trainer's."""
MISSING = {
    ROLLOUT: "set actor_rollout_ref.rollout.calculate_log_probs=True, and let the agent loop return them.",
    REFERENCE: "let the worker of your reference return it for every row, or set actor_rollout_ref.actor.use_kl_loss=False and "
    "algorithm.use_kl_in_reward=False if you want no reference.",
    MASK: "let the agent loop return it for every answer, with 1 at each token of the policy's.",
}
"""What to do about a field that rollouts do not have, for messages."""
OF_VERLS_PASS = "let the worker of your actor return it for every row, as verl's own does."
BEFORE = "loss_mask"
"""verl's mask before its rollout correction rejects tokens from `MASK`."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Which pass of the trainer scored a batch, and with which weights."""

    field: str = OLD  # or `SCORED`, for a pass whose scores verl has not cut to the responses
    version: int | None = None  # of the weights, to measure older versions' tokens apart; None measures all together
    replayed: bool = False  # whether the pass replays the rollouts' routes


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of the N sampled responses of a batch, without the rows that verl added to fill it up."""

    lengths: Tensor  # tokens of each response that the policy itself sampled `[N]`, without bad rows if others are left
    truncated: Tensor  # whether each response, tools' tokens included, has reached the length limit `[N]`
    tokens: Tensor  # sampled tokens of all rows of the batch, in its order
    gap: Sums | None = None  # of `gap_sums`; None if the trainer has scored nothing
    drift: Sums | None = None  # of `drift_sums`; None if versions are not measured apart
    kl: Sums | None = None  # of `kl_sums`; None without a section


def sampled_rows(batch: Any) -> list[int]:
    """Return the rows of a batch that were sampled, without those that verl added to fill it up."""
    return [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]


class BadKeys:
    """The bad rows of a batch by key, because verl reorders its rows; the rows that verl added are none of them.

    Attributes:
        rows: The same by number, in the order of `sampled_rows`.
    """

    def __init__(self, batch: Any) -> None:
        keys = [batch.keys[row] for row in sampled_rows(batch)]
        self.rows = BadRows(len(keys))
        self._numbers = {key: number for number, key in enumerate(keys)}

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, key: str) -> bool:
        return self._numbers.get(key) in self.rows.faults

    def add(self, key: str, reason: str, message: str) -> None:
        """Call a row bad for one of `BAD_ROW_REASONS`, if it was sampled."""
        if key in self._numbers:
            self.rows.add(self._numbers[key], reason, message)

    def flags(self, keys: Sequence[str]) -> Tensor:
        """Return which of some rows are bad, bool."""
        return torch.tensor([key in self for key in keys], dtype=torch.bool)


def take_faults(batch: Any, step: int, bad: BadKeys) -> None:
    """Add the rows to `bad` that the scoring pass found to be bad; fetches nothing if it found none."""
    keys = list(batch.keys)
    # Either all rows have the field or none, because workers agree on whether they return it.
    if FAULT not in tq.get_client().kv_retrieve_meta(keys, batch.partition_id).field_names:
        return
    for first in range(0, len(keys), CHUNK):
        part = keys[first : first + CHUNK]
        data = tq.kv_batch_get(keys=part, partition_id=batch.partition_id, select_fields=[FAULT])
        for key, numbers in zip(part, data[FAULT].unbind(), strict=True):
            number = int(numbers.max())
            if not number:
                continue
            reason = reason_of(number)
            where = f"rollout {key} of step {step}"
            bad.add(key, reason, f"{where}: {BAD_ROW_REASONS[reason]}. The log of the worker that scored it says more.")


def measure(
    batch: Any,
    step: int,
    scoring: Scoring | None,
    bad: BadKeys,
    *,
    longest: int,
    reference: bool = False,
    kl: KlConfig | None = None,
    sample: int = 0,
    seed: int = 0,
) -> Measured:
    """Measure a batch of verl's keys whose fields are in its TransferQueue, in one loop over its rows.

    Adds rows to `bad` that have a log-probability which is not finite. Bad rows are left out of what is measured. They stay in
    the baseline of other rows, as their rewards stay in their groups' statistics.

    Args:
        batch: The keys.
        step: The step, for messages, and the seed by which rows are drawn whose means are measured (`rows_of_means`).
        scoring: The pass that scored the batch; None if there was none, and no gap.
        bad: The bad rows that are known.
        longest: The limit of a response, tokens.
        reference: Whether a reference has scored the batch.
        kl: The section whose KL is measured; if it has a leave-one-out baseline, that is put into the batch.
        sample: That of `gap_sums`.
        seed: That of `gap_sums`; the chunk's number is added.

    Raises:
        RecordError: A field is missing or too short.
    """
    names = [ROLLOUT, MASK]
    if scoring is not None:
        names += [scoring.field] if scoring.version is None else [scoring.field, EXTRA]
    if reference or kl is not None:
        names += [REFERENCE]
    if kl is not None and OLD not in names:
        names += [OLD]
    keys = list(batch.keys)
    number_of = {key: number for number, key in enumerate(keys)}
    # A row that verl added to fill the batch up is never drawn.
    known = torch.tensor([0 if tag.get("is_padding") else int(tag.get("response_len", 0)) for tag in batch.tags])
    means = rows_of_means(known, step, MEANS_OF)
    has_baseline = kl is not None and kl.has_baseline
    places, tokens = torch.zeros(len(keys), dtype=torch.int64), torch.zeros(len(keys), dtype=torch.int64)
    gaps, drifts, kls = list[Sums](), list[Sums](), list[Sums]()
    for number, together in enumerate(chunks(groups(keys) if has_baseline else [[key] for key in keys])):
        rows = [number_of[key] for group in together for key in group]
        chunk = _Chunk(batch, rows, names, step)
        tokens[rows], places[rows] = chunk.tokens, chunk.lengths
        chunk.judge(ROLLOUT, "rollout_logprobs", bad)
        if scoring is not None:
            chunk.cut(scoring.field)
            chunk.judge(scoring.field, "old_logprobs", bad)
        if reference or kl is not None:
            chunk.judge(REFERENCE, "old_logprobs", bad)
        left_out = bad.flags(chunk.keys)
        if scoring is not None:
            gaps.append(chunk.gap(scoring.field, left_out, means=means[rows], sample=sample, seed=seed + number))
            if scoring.version is not None:
                drifts.append(chunk.drift(scoring, left_out, means[rows]))
        if kl is not None:
            kls.append(chunk.kl(left_out))
            if has_baseline:
                prompts = torch.tensor([place for place, group in enumerate(together) for _ in group])
                chunk.put_baseline(kl, prompts, left_out)
    sampled = sampled_rows(batch)
    good = [row for row in sampled if keys[row] not in bad]
    # The rate's rule needs a length even if all rows are bad.
    kept = good or sampled
    return Measured(
        lengths=tokens[kept],
        truncated=places[kept] >= longest,
        tokens=tokens,
        gap=merged(*gaps) if gaps else None,
        drift=merged(*drifts) if drifts else None,
        kl=merged(*kls) if kls else None,
    )


class _Chunk:
    """Some rows of a batch, by number, whose responses are one after the other."""

    def __init__(self, batch: Any, rows: Sequence[int], names: Sequence[str], step: int) -> None:
        self.keys = [batch.keys[row] for row in rows]
        self._tags = [batch.tags[row] for row in rows]
        self._partition, self._step = batch.partition_id, step
        self._data = tq.kv_batch_get(keys=self.keys, partition_id=self._partition, select_fields=list(names))
        mask = self._field(MASK)
        self.lengths = mask.offsets().diff()  # places of each response, tools' tokens included
        self._sampled = mask.values().bool()
        self._ends = self.lengths.cumsum(0)
        before = torch.nn.functional.pad(self._sampled.cumsum(0), (1, 0))
        self.tokens = before[self._ends] - before[self._ends - self.lengths]

    def _field(self, name: str) -> Any:
        field = self._data.get(name, None)
        if field is None:
            raise RecordError(
                f"rollouts {self.keys[0]} to {self.keys[-1]} of step {self._step} have no {name}; "
                f"{MISSING.get(name, OF_VERLS_PASS)}"
            )
        return field

    def _padded(self, name: str) -> Tensor:
        padded: Tensor = self._field(name).to_padded_tensor(0)
        return padded

    def _counted(self, left_out: Tensor) -> Tensor:
        """Return which places are measured `[R]`: sampled tokens of rows that are not left out."""
        counted: Tensor = self._sampled & ~left_out.repeat_interleave(self.lengths)
        return counted

    def cut(self, name: str) -> None:
        """Cut the scores of a pass to the responses, if verl has not."""
        if name == SCORED:
            self._data[name] = response_from_nested(self._field(name), self._field(MASK))

    def judge(self, name: str, reason: str, bad: BadKeys) -> None:
        """Call rows bad that have not a finite value for each sampled token; raises RecordError if a field's length is wrong."""
        field = self._field(name)
        counts = field.offsets().diff()
        if len(wrong := (counts != self.lengths).nonzero()):
            row = int(wrong[0])
            raise RecordError(
                f"rollout {self.keys[row]} of step {self._step} has {int(counts[row])} {name} and {int(self.lengths[row])} "
                f"places in {MASK}; the agent loop must give one of each for every token of a response."
            )
        values = field.values()
        broken = (~values.isfinite() & self._sampled).nonzero()[:, 0]
        rows = torch.searchsorted(self._ends, broken, right=True)
        side = SIDES.get(name, "trainer")
        # The last place of a row is written first, so that the first one stays.
        first = dict(zip(rows.flip(0).tolist(), broken.flip(0).tolist(), strict=True))
        for row, place in first.items():
            token = place - int(self._ends[row] - self.lengths[row])
            where = f"rollout {self.keys[row]} of step {self._step}, token {token}"
            bad.add(self.keys[row], reason, f"{where}: the {side}'s log-probability is {float(values[place])}.")

    def gap(self, name: str, left_out: Tensor, *, means: Tensor, sample: int, seed: int) -> Sums:
        """Return `gap_sums` of the rows that are not left out, by the scores of a field."""
        return gap_sums(
            old=self._field(name).values().float(),
            rollout=self._field(ROLLOUT).values().float(),
            mask=self._counted(left_out),
            lengths=self.lengths,
            means=means,
            sample=sample,
            seed=seed,
        )

    def drift(self, scoring: Scoring, left_out: Tensor, means: Tensor) -> Sums:
        """Return `drift_sums` of the rows that are not left out, by the versions that sampled their tokens."""
        assert scoring.version is not None
        mask = self._padded(MASK).bool() & ~left_out[:, None]
        fields = self._data.get(EXTRA, None)
        # Without it the versions are unknown.
        extra = [{}] * len(self.keys) if fields is None else fields.tolist()
        segments = [
            segments_of(row or {}, int(tag.get("prompt_len", 0)), places)
            for row, tag, places in zip(extra, self._tags, self.lengths.tolist(), strict=True)
        ]
        versions = token_versions(segments, mask)
        return drift_sums(
            old=self._padded(scoring.field).float(),
            rollout=self._padded(ROLLOUT).float(),
            mask=mask,
            versions=versions,
            scoring=scoring.version,
            comparable=of_one_version(versions, mask) if scoring.replayed else mask,
            means=means,  # the rows that the gap's means are of, so that both agree where all weights are the present ones
        )

    def kl(self, left_out: Tensor) -> Sums:
        """Return `kl_sums` of the rows that are not left out."""
        policy, reference = (self._field(name).values() for name in (OLD, REFERENCE))
        return kl_sums(logprobs=policy, ref_logprobs=reference, mask=self._counted(left_out))

    def put_baseline(self, section: KlConfig, prompts: Tensor, left_out: Tensor) -> None:
        """Put each token's leave-one-out baseline into the batch; `prompts` are the rows' groups `[B]`."""
        fields = {name: self._padded(name) for name in (OLD, REFERENCE, MASK, ROLLOUT)}
        if left_out.any():
            # Other rows' baselines depend on bad rows, as they are once their log-probabilities have been replaced.
            fields[ROLLOUT], fields[OLD] = finite(fields[ROLLOUT], fields[OLD])
            reference = fields[REFERENCE]
            fields[REFERENCE] = torch.where(reference.isfinite(), reference, fields[OLD].to(reference))
        baseline = response_to_nested(baseline_of(fields, section, prompts), self._field(MASK))
        values = TensorDict({BASELINE: baseline}, batch_size=len(self.keys))
        tq.kv_batch_put(keys=self.keys, partition_id=self._partition, fields=values)


def finite(rollout: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities where each that is not finite is the other side's, or 0 if neither is finite."""
    of_rollout = torch.where(rollout.isfinite(), rollout, torch.where(old.isfinite(), old.to(rollout), 0.0))
    return of_rollout, torch.where(old.isfinite(), old, of_rollout.to(old))


def segments_of(extra: Mapping[str, Any], prompt: int, response: int) -> list[tuple[int | None, int]]:
    """Return the segments of a rollout, pairs (version, first token), from its `extra_fields` and its tokens.

    There is one for each request if a client noted them, otherwise one from its first and last version. Where the two
    contradict each other, nobody says which weights sampled a token.
    """
    noted, span = extra.get(VERSIONS) or [], (extra.get("min_global_steps"), extra.get("max_global_steps"))
    # Several outputs of one conversation share its segments.
    within = [(version, at) for version, at in noted if prompt <= at < prompt + response]
    for whole in (noted, within):
        # The segments of a whole rollout begin right after its prompt; those of some turns do not tell of the others.
        if whole and whole[0][1] == prompt == min(at for _, at in whole) and (whole[0][0], whole[-1][0]) == span:
            return [(version, at - prompt) for version, at in whole]
    # Where the versions differ, nobody says at which token the weights changed.
    return [(span[0] if span[0] == span[1] and not within else None, 0)]


def left_by_correction(batch: Any) -> Tensor:
    """Return how many tokens of each row verl's correction keeps with a weight above 0 `[B]`."""
    left = []
    for first in range(0, len(batch.keys), CHUNK):
        keys = list(batch.keys[first : first + CHUNK])
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=[MASK, WEIGHTS])
        kept = data[MASK].to_padded_tensor(0).bool()
        weights = data.get(WEIGHTS, None)
        if weights is not None:
            kept = kept & (weights.to_padded_tensor(0.0) != 0)
        left.append(kept.sum(1))
    return torch.cat(left)


def baseline_of(fields: Any, section: KlConfig, prompts: Tensor) -> Tensor:
    """Return the leave-one-out baseline of each token `[B, T]`, nats, from fields before rejection and the rows' groups `[B]`."""
    behavior = sampled_by(fields) if section.ratio != "none" else None
    return kl_baseline(
        logprobs=fields[OLD],
        ref_logprobs=fields[REFERENCE],
        mask=fields[MASK].bool(),
        settings=section,
        behavior=behavior,
        groups=prompts,
    )


def groups(keys: Sequence[str]) -> list[list[str]]:
    """Return the rows that answer the same prompt, by their keys `{uid}_{session}_{output}`, in the order of their first rows.

    Outputs of one session, such as the turns of an agent, depend on each other. Where a session has several, each is a group of
    its own: it has no baseline, and is in no other row's baseline.
    """
    sessions = [key.rsplit("_", 1)[0] for key in keys]
    outputs = Counter(sessions)
    rows: dict[str, list[str]] = {}
    for key, session in zip(keys, sessions, strict=True):
        rows.setdefault(key if outputs[session] > 1 else session.rsplit("_", 1)[0], []).append(key)
    return list(rows.values())


def chunks(groups: Sequence[list[str]]) -> Iterator[list[list[str]]]:
    """Return whole groups, together `CHUNK` rows or fewer unless one alone has more."""
    chunk: list[list[str]] = []
    for group in groups:
        if chunk and sum(map(len, chunk)) + len(group) > CHUNK:
            yield chunk
            chunk = []
        chunk.append(group)
    if chunk:
        yield chunk
