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
from mismatch_ext.gap import gap_sums
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
    gap: Sums | None = None  # of `gap_sums`; None if the trainer has scored nothing
    drift: Sums | None = None  # of `drift_sums`; None if versions are not measured apart


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


def measure(
    batch: Any, step: int, scoring: Scoring | None, bad: BadKeys, *, longest: int, sample: int = 0, seed: int = 0
) -> Measured:
    """Measure a batch of verl's keys whose fields are in its TransferQueue; `longest` is the limit of a response, tokens.

    Adds rows to `bad` that have a log-probability which is not finite, or that the scoring pass found to be bad. Bad rows are
    left out of what is measured. `step` is for messages; `sample` and `seed` are those of `gap_sums`, the seed plus the chunk's
    number. Raises RecordError for a field that is missing or too short.
    """
    names = [ROLLOUT, MASK]
    if scoring is not None:
        names += [scoring.field, FAULT] if scoring.version is None else [scoring.field, FAULT, EXTRA]
    tokens, places, gaps, drifts = [], [], [], []
    for number, first in enumerate(range(0, len(batch.keys), CHUNK)):
        rows = slice(first, first + CHUNK)
        data = tq.kv_batch_get(keys=list(batch.keys[rows]), partition_id=batch.partition_id, select_fields=names)
        chunk = _Chunk(data, batch.keys[rows], step)
        tokens.append(chunk.tokens)
        places.append(chunk.lengths)
        chunk.judge(ROLLOUT, "rollout_logprobs", bad)
        if scoring is None:
            continue
        if scoring.field == SCORED:
            data[SCORED] = response_from_nested(data[SCORED], data[MASK])
        chunk.take_faults(bad)
        chunk.judge(scoring.field, "old_logprobs", bad)
        left_out = bad.flags(chunk.keys)
        measured = chunk.sampled & ~left_out.repeat_interleave(chunk.lengths)
        old, rollout = (data[name].values().float() for name in (scoring.field, ROLLOUT))
        gaps.append(
            gap_sums(old=old, rollout=rollout, mask=measured, lengths=chunk.lengths, sample=sample, seed=seed + number)
        )
        if scoring.version is not None:
            drifts.append(_drift_of(data, batch.tags[rows], scoring, left_out))
    sampled, limit = sampled_rows(batch), torch.cat(places) >= longest
    good = [row for row in sampled if batch.keys[row] not in bad]
    # The rate's rule needs a length even if all rows are bad.
    kept = good or sampled
    return Measured(
        lengths=torch.cat(tokens)[kept],
        truncated=limit[kept],
        gap=merged(*gaps) if gaps else None,
        drift=merged(*drifts) if drifts else None,
    )


def judge_reference(batch: Any, step: int, bad: BadKeys) -> None:
    """Add rows to `bad` whose log-probability of the reference is not finite; `step` is for messages."""
    for first in range(0, len(batch.keys), CHUNK):
        keys = batch.keys[first : first + CHUNK]
        data = tq.kv_batch_get(keys=list(keys), partition_id=batch.partition_id, select_fields=[REFERENCE, MASK])
        _Chunk(data, keys, step).judge(REFERENCE, "old_logprobs", bad)


class _Chunk:
    """Some rows of a batch, whose responses are one after the other."""

    def __init__(self, data: Any, keys: Sequence[str], step: int) -> None:
        self._data, self.keys, self._step = data, keys, step
        mask = self._field(MASK)
        self.lengths = mask.offsets().diff()  # places of each response, tools' tokens included
        self.sampled = mask.values().bool()
        self._ends = self.lengths.cumsum(0)
        before = torch.nn.functional.pad(self.sampled.cumsum(0), (1, 0))
        self.tokens = before[self._ends] - before[self._ends - self.lengths]

    def _field(self, name: str) -> Any:
        field = self._data.get(name, None)
        if field is None:
            raise RecordError(
                f"rollouts {self.keys[0]} to {self.keys[-1]} of step {self._step} have no {name}; "
                f"{MISSING.get(name, OF_VERLS_PASS)}"
            )
        return field

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
        broken = (~values.isfinite() & self.sampled).nonzero()[:, 0]
        rows = torch.searchsorted(self._ends, broken, right=True)
        side = SIDES.get(name, "trainer")
        # The last place of a row is written first, so that the first one stays.
        first = dict(zip(rows.flip(0).tolist(), broken.flip(0).tolist(), strict=True))
        for row, place in first.items():
            token = place - int(self._ends[row] - self.lengths[row])
            where = f"rollout {self.keys[row]} of step {self._step}, token {token}"
            bad.add(self.keys[row], reason, f"{where}: the {side}'s log-probability is {float(values[place])}.")

    def take_faults(self, bad: BadKeys) -> None:
        """Call rows bad that the scoring pass found to be bad."""
        field = self._data.get(FAULT, None)
        if field is None:
            return
        for key, numbers in zip(self.keys, field.unbind(), strict=True):
            if number := int(numbers.max()):
                reason = reason_of(number)
                where = f"rollout {key} of step {self._step}"
                bad.add(
                    key, reason, f"{where}: {BAD_ROW_REASONS[reason]}. The log of the worker that scored it says more."
                )


def _drift_of(data: Any, tags: Sequence[Mapping[str, Any]], scoring: Scoring, left_out: Tensor) -> Sums:
    """Measure a chunk, without the rows that are left out, by the versions that sampled its tokens."""
    assert scoring.version is not None
    old, rollout = (data[name].to_padded_tensor(0.0).float() for name in (scoring.field, ROLLOUT))
    mask = data[MASK].to_padded_tensor(0).bool() & ~left_out[:, None]
    # Without it the versions are unknown.
    extra = [{}] * len(tags) if (fields := data.pop(EXTRA, None)) is None else fields.tolist()
    segments = [
        segments_of(row or {}, int(tag.get("prompt_len", 0)), places)
        for row, tag, places in zip(extra, tags, data[MASK].offsets().diff().tolist(), strict=True)
    ]
    versions = token_versions(segments, mask)
    comparable = of_one_version(versions, mask) if scoring.replayed else mask
    return drift_sums(
        old=old, rollout=rollout, mask=mask, versions=versions, scoring=scoring.version, comparable=comparable
    )


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


def left_by_correction(batch: Any, bad: BadKeys) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield which tokens verl's correction keeps with a weight above 0, and which were sampled, `[B, T]` chunk by chunk.

    Bad rows are left out.
    """
    good = [key for key in batch.keys if key not in bad]
    for first in range(0, len(good), CHUNK):
        keys = good[first : first + CHUNK]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=[MASK, BEFORE, WEIGHTS])
        if data.get(BEFORE, None) is None:
            raise RecordError(
                f"rollouts {keys[0]} to {keys[-1]} have no {BEFORE}, so that nobody can say what the correction rejected. Put "
                "it into the batch beside response_mask, as verl's agent loops do."
            )
        kept, sampled = data[MASK].to_padded_tensor(0).bool(), data[BEFORE].to_padded_tensor(0).bool()
        if (weights := data.get(WEIGHTS, None)) is not None:
            kept = kept & (weights.to_padded_tensor(0.0) != 0)
        yield kept, sampled


def measure_kl(batch: Any, section: KlConfig, bad: BadKeys) -> Sums:
    """Return `kl_sums` of a batch without its bad rows; put its leave-one-out baseline into the batch if the section has one.

    Bad rows stay in the baseline of other rows, as their rewards stay in their groups' statistics.
    """
    names = [OLD, REFERENCE, MASK, *([ROLLOUT] if section.has_baseline and section.ratio != "none" else [])]
    nothing = torch.zeros(0)
    sums = [kl_sums(logprobs=nothing, ref_logprobs=nothing, mask=nothing)]
    for chunk in chunks(groups(batch.keys)):
        keys = [key for group in chunk for key in group]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=names)
        responses, padded = data[MASK], data.to_padded_tensor()
        measured = padded[MASK].bool() & ~bad.flags(keys)[:, None]
        sums.append(kl_sums(logprobs=padded[OLD], ref_logprobs=padded[REFERENCE], mask=measured))
        if section.has_baseline:
            prompts = torch.tensor([number for number, group in enumerate(chunk) for _ in group])
            values = {BASELINE: response_to_nested(baseline_of(padded, section, prompts), responses)}
            fields = TensorDict(values, batch_size=len(keys))
            tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields)
    return merged(*sums)


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
