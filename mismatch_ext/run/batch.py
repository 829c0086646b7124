"""One batch of rollouts on its way through a training step, with everything that is known about it in named fields.

Shapes: B rollouts, S tokens of prompt and response, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mismatch_ext.errors import RecordError, RoutingError
from mismatch_ext.records import Provenance, RolloutRecord, collate
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.verdicts import Verdicts


@dataclass(kw_only=True, eq=False)
class Batch:
    """Rollouts as tensors: each row is a prompt followed by its response, padded on the right.

    With padding on the right, positions begin at 0 in every row, whatever the model does with them. A batch lives from
    `run.batch` to the step that learns from it.

    Args:
        tokens: `[B, S]`, int64; 0 at padding.
        attention_mask: True at tokens `[B, S]`.
        prompt_lengths: Number of tokens of each prompt `[B]`, int64.
        response_mask: True at tokens that the policy sampled `[B, T]`.
        rollout_logprobs: The engine's log-probabilities `[B, T]`, in nats, float32; 0 at padding.
        groups: Number of each row's prompt among the prompts of the batch `[B]`, int64; rows of one prompt share it.
        temperature: Temperature that the tokens were sampled at.
        provenance: Provenance of the rollouts, the same for all rows.
        records: The rollouts.
        split: "train" or "eval/<name>".
        routing: A trace per row; None while no routes are known. Under R2 the first scoring pass sets it.
        origin: An object that a batch shares with all batches that are cut from it.
        part: Whether this is only a part of the rows of a batch.
    """

    tokens: Tensor
    attention_mask: Tensor
    prompt_lengths: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    groups: Tensor
    temperature: float
    provenance: Provenance
    records: tuple[RolloutRecord, ...]
    split: str = "train"
    routing: list[RoutingTrace] | None = field(default=None, repr=False)
    origin: object = field(default_factory=object, repr=False)
    part: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each response `[B]`, int64."""
        return self.attention_mask.sum(1) - self.prompt_lengths

    def of_responses(self, values: Tensor) -> Tensor:
        """Return the values of the response tokens `[B, T]`, 0 at padding, from those of all tokens but the first `[B, S-1]`."""
        places = torch.arange(self.response_mask.shape[1], device=values.device) + self.prompt_lengths[:, None] - 1
        inside = places < (self.attention_mask.sum(1) - 1)[:, None]
        return values.gather(1, places.clamp(max=values.shape[1] - 1)).masked_fill(~inside, 0.0)

    def rows(self, first: int, last: int) -> Batch:
        """Return some of the rows as a batch, for example as a micro-batch; padding stays as it is.

        Args:
            first, last: Rows `first` to `last - 1` are returned.
        """
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        cut = {k: v[first:last] for k, v in found.items() if k == "routing" and v is not None or k == "records"}
        cut |= {name: value[first:last] for name, value in found.items() if isinstance(value, Tensor)}
        return replace(self, **cut, part=self.part or len(cut["records"]) < len(self))


def batch_of(records: Sequence[RolloutRecord], device: torch.device, split: str = "train") -> Batch:
    """Turn rollouts into a batch.

    Args:
        records: Rollouts of one provenance; rollouts of the same prompt form a group, in any order.
        device: Device of the tensors.
        split: "train" or "eval/<name>".

    Raises:
        RecordError: There are no rollouts, one has no prompt, or only some of them have routes.
        RecordError: The rollouts differ in their provenance.
    """
    found = collate(records, pad_token_id=0)
    for row, record in enumerate(records):
        if not record.prompt_ids:
            raise RecordError(f"row {row} has no prompt; give at least one token, such as the one that begins a text.")
    routes = [record.routing for record in records if record.routing is not None]
    if routes and len(routes) != len(records):
        raise RecordError(f"{len(routes)} of {len(records)} rollouts have routes; allowed: all of them or none.")
    rows = [torch.tensor([*record.prompt_ids, *record.response_ids]) for record in records]
    numbers: dict[tuple[int, ...], int] = {}
    groups = [numbers.setdefault(record.prompt_ids, len(numbers)) for record in records]
    return Batch(
        tokens=pad_sequence(rows, batch_first=True).to(device),
        attention_mask=pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True).to(
            device
        ),
        prompt_lengths=torch.tensor([len(record.prompt_ids) for record in records], device=device),
        response_mask=found.response_mask.to(device),
        rollout_logprobs=found.rollout_logprobs.to(device),
        groups=torch.tensor(groups, device=device),
        temperature=found.provenance.sampling.temperature,
        provenance=found.provenance,
        records=tuple(records),
        split=split,
        routing=routes or None,
    )


def lay_out(records: Sequence[RolloutRecord], device: torch.device, split: str, verdicts: Verdicts) -> Batch:
    """Turn rollouts into a batch as `batch_of` does; if it refuses them under `observe`, use one provenance and no routes.

    Raises:
        RecordError: As `batch_of`; a row that cannot be a tensor, for example one without a prompt, is refused under `observe`
            too.
        RecordError: As `batch_of`.
    """
    with verdicts.checking("records"):
        return batch_of(records, device, split)
    return batch_of(
        [replace(record, provenance=records[0].provenance, routing=None) for record in records], device, split
    )


def routes_of(passes: Sequence[RoutingTrace], batch: Batch) -> list[RoutingTrace]:
    """Return the routes of each row of a batch from the last recorded forward pass over the whole batch.

    Args:
        passes: Routes of each recorded forward pass, with a row per position, padding included.
        batch: The batch.

    Raises:
        RoutingError: No recorded pass was over the whole batch.
    """
    rows, width = batch.tokens.shape
    found = next((trace for trace in reversed(passes) if trace.rows == rows * width), None)
    if found is None:
        sizes = [trace.rows for trace in passes]
        raise RoutingError(
            f"the forward passes that were recorded are over {sizes} tokens, and the batch is {rows} x {width}; run the model on "
            "batch.tokens, all rows at once."
        )
    trace = found.to("cpu")
    return [
        trace.sequence(row * width, row * width + length)
        for row, length in enumerate(batch.attention_mask.sum(1).tolist())
    ]
