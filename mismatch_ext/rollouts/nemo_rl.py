"""NeMo-RL's `train_data_step*.jsonl`: one line of JSON per sequence, padded on the right.

`Logger.log_batched_dict_as_jsonl` of `nemo_rl/utils/logger.py` writes it, from what `grpo_train` of
`nemo_rl/algorithms/grpo.py` passes (NVIDIA-NeMo/RL, commit 7ea279abfbeb698b092856d0dab61e7cf39bc909). A line is a
batch of one, so every field is a list with one entry. `generation_logprobs` has a 0 at tokens that were not sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_ext.errors import RecordError
from mismatch_ext.rollouts.fields import ensure_keys, flags, logprobs, token_ids
from mismatch_ext.rollouts.logged import LoggedResponse, split

HOST = "NeMo-RL"
NEEDED = ("token_ids", "token_loss_mask", "generation_logprobs", "input_lengths")


def is_nemo_rls(row: Mapping[str, Any]) -> bool:
    """Whether a row is in NeMo-RL's format."""
    return row.keys() >= {"token_loss_mask", "input_lengths", "idx"}


def read_row(row: Mapping[str, Any], where: str) -> LoggedResponse | None:
    """Read one sequence; None if none of its tokens was sampled.

    Raises:
        RecordError: A field is missing or malformed; names it.
    """
    ensure_keys(row, NEEDED, where, "NeMo-RL's GRPO logs them; its distillation has none")
    one: dict[str, Any] = {}
    for key in NEEDED:
        if not isinstance(row[key], list) or len(row[key]) != 1:
            raise RecordError(f"{where}: {key} must be a list with one entry, as NeMo-RL writes a batch of one.")
        one[key] = row[key][0]
    length = one["input_lengths"]
    if type(length) is not int or length < 0:
        raise RecordError(f"{where}: input_lengths must be a whole number of tokens, and is {length!r}.")
    found = split(
        token_ids(one, "token_ids", where)[:length],
        flags(one, "token_loss_mask", where)[:length],
        logprobs(one, "generation_logprobs", where)[:length],
        where,
    )
    return None if found is None else LoggedResponse(**found)
