"""One batch from generation to its loss, and its scoring passes, which are found by their tokens and never as "the last one".

Names in this folder: `tokens` and `attention_mask` are prompt and completion `[B, S]`, prompts padded on the left and completions
on the right; `length` is the number of completion positions T; log-probabilities are `[B, T]`, and so is `mask`, 1 for trained
tokens. `output` is what TRL's `_generate_and_score_completions` returns, and `inputs` a micro-batch of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.trl.replay import Scores
from mismatch_ext.adapters.trl.rows import RowTable, prompts_of, row_key, row_keys
from torch import Tensor

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.errors import RecordError
from mismatch_ext.rollout import RolloutRecord

LEADING = ("model", "input_ids", "attention_mask", "logits_to_keep")
"""What `_get_per_token_logps_and_entropies` takes first, in TRL's order."""


@dataclass(frozen=True)
class Scored:
    """A scoring pass and what came out; `options` is what else was given, by name."""

    model: Any
    tokens: Tensor
    attention_mask: Tensor
    length: int
    options: dict[str, Any]
    reference: bool
    scores: Scores

    @classmethod
    def of(cls, arguments: Sequence[Any], named: Mapping[str, Any], reference: bool, scores: Scores) -> Scored:
        """Return what a call of the method was given, by position and by name."""
        given = {**dict(zip((*LEADING, "batch_size"), arguments, strict=False)), **named}
        model, tokens, attention_mask, length = (given.pop(name) for name in LEADING)
        return cls(model, tokens, attention_mask, length, given, reference, scores)

    def is_of(self, tokens: Tensor, attention_mask: Tensor, length: int) -> bool:
        """Tell whether these are the tokens that were scored, in the same places."""
        return (
            self.length == length
            and torch.equal(self.tokens, tokens)
            and torch.equal(self.attention_mask, attention_mask)
        )

    def is_of_rows(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> bool:
        """Tell whether these are the tokens that were scored, whatever the padding."""
        keys = row_keys(self.tokens, self.attention_mask, self.length)
        return keys == [row_key(*row) for row in zip(prompts, completions, strict=True)]


@dataclass
class RolloutPass:
    """What is known of a batch of rollouts while it is generated and scored; its rows outlive it, in the table."""

    size: int = 0  # rows that TRL was asked for; several generations may be made to choose them from
    prompts: list[list[int]] = field(default_factory=list)  # of the latest generation
    generated: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompt and completion of each sample
    records: list[RolloutRecord] = field(default_factory=list)  # what the engine returned, in its order
    table: RowTable = field(default_factory=RowTable)
    taken: int = 0  # records that the table has been told of
    recorded: int = 0  # passes whose routes were recorded, with R2
    scored: list[Scored] = field(default_factory=list)  # the host's passes, where they are kept
    policy: Tensor | None = None  # log-probabilities [B, T] by a pass of our own, where the host takes none
    joining: bool = False  # turns are being generated, so that records are of calls and not yet of completions

    def has_size_of(self, rows: int) -> bool:
        """Tell whether a pass over so many rows may be over the whole batch, of which some may be bad."""
        # A user's own pass may be over a few rows of the batch, and others.
        return rows >= self.size > 0

    def records_of(self, output: Mapping[str, Any], bad: BadRows) -> list[RolloutRecord | None]:
        """Return the record of each row of a batch, found by the row's tokens: a user's code may move, drop or repeat rows.

        Args:
            output: The batch.
            bad: Takes the rows whose tokens are not those of a record.

        Raises:
            RecordError: No row has a record's tokens.
        """
        ids, length = output["completion_ids"], output["completion_ids"].size(1)
        tokens, real = (
            torch.cat([output[f"prompt_{name}"], output[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
        )
        samples: defaultdict[bytes, list[RolloutRecord]] = defaultdict(list)
        for record in self.records:
            samples[record.prompt_ids.tobytes()].append(record)
        found: list[RolloutRecord | None] = []
        taken = Counter[int]()
        prompts = prompts_of(tokens, real, length)
        completions, masks = ids.cpu().numpy(), output["completion_mask"].bool().cpu().numpy()
        for row, (prompt, completion, mask) in enumerate(zip(prompts, completions, masks, strict=True)):
            # A completion that was turned into padding has no mask to end it.
            fitting = [
                (count, -taken[id(record)], record)
                for record in samples[np.array(prompt, dtype=np.int64).tobytes()]
                if np.array_equal(completion[: (count := len(record.response_ids))], record.response_ids)
                and not mask[count:].any()
            ]
            if not fitting:
                message = (
                    f"row {row}: the tokens to be trained on are not those that the engine sampled ({len(self.records)} "
                    f"completions for {len(ids)} rows). Generate with trainer.vllm_generation.generate, and put a class that "
                    "changes tokens or adds rows first: class T(Yours, MismatchGRPOTrainer)."
                )
                bad.add(row, "tokens", message)
                found.append(None)
                continue
            _, _, record = max(fitting, key=lambda candidate: candidate[:2])
            taken[id(record)] += 1
            found.append(record)
        if bad.spoil_all and all(record is None for record in found):
            raise RecordError(bad.faults[0].message)
        return found

    def first_pass(self, is_of: Callable[[Scored], bool], *, reference: bool = False) -> Scored | None:
        """Return the first pass of the policy, or of the reference, over some tokens; None if there was none."""
        return next((one for one in self.scored if one.reference == reference and is_of(one)), None)
