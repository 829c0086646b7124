"""What a rank measures of stale rollouts in its part of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_ext.adapters.verl.rollout.client import FIELD
from mismatch_ext.adapters.verl.worker.measuring import MASK, ROLLOUT
from verl.workers.utils.padding import response_from_nested

from mismatch_ext.drift import drift_sums, of_one_version, token_versions
from mismatch_ext.errors import MismatchError, RecordError

STALE = "mismatch_stale"
"""Entry of a batch that asks for its parts by version in the pass that scores it: `version`, `replayed`."""
EXTRA, PROMPTS = "extra_fields", "prompts"


def fields_of_stale(data: Any) -> dict[str, Any]:
    """Return the fields of a batch that are measured; read them before a pass, which may take them out."""
    return {name: data.get(name, None) for name in (ROLLOUT, MASK, EXTRA, PROMPTS)}


def stale_gap(fields: Mapping[str, Any], log_probs: Any, *, version: int, replayed: bool) -> Any:
    """Measure a part of a batch by the versions that sampled its tokens.

    Args:
        fields: As `fields_of_stale` returns them.
        log_probs: Log-probabilities of all of its tokens at this version, prompts included, a nested tensor.
        version: Version of the weights that score it.
        replayed: Whether the pass replays the rollouts' routes.

    Returns:
        Sums of `drift_sums`, or the error that stands in the way.
    """
    try:
        if fields[ROLLOUT] is None or fields[EXTRA] is None:
            raise RecordError(
                f"the batch has no {ROLLOUT if fields[ROLLOUT] is None else EXTRA}; its versions are unknown."
            )
        scored = response_from_nested(log_probs, fields[MASK])
        now, rollout = (values.to_padded_tensor(0.0).float().cpu() for values in (scored, fields[ROLLOUT]))
        mask = fields[MASK].to_padded_tensor(0).bool().cpu()
        versions = token_versions(_segments(fields), mask)
        comparable = of_one_version(versions, mask) if replayed else mask
        return drift_sums(now, rollout, mask, versions, scoring=version, comparable=comparable)
    except MismatchError as error:
        return error


def _segments(fields: Mapping[str, Any]) -> list[list[tuple[int | None, int]]]:
    rows = fields[EXTRA].tolist() if hasattr(fields[EXTRA], "tolist") else list(fields[EXTRA])
    return [
        segments_of(row, int(prompt))
        for row, prompt in zip(rows, fields[PROMPTS].offsets().diff().tolist(), strict=True)
    ]


def segments_of(extra: Mapping[str, Any], prompt: int) -> list[tuple[int | None, int]]:
    """Return the segments of a rollout, pairs (version, first token).

    There is one for each request if a client noted them, otherwise one from its first and last version.

    Args:
        extra: The rollout's `extra_fields` in verl.
        prompt: Tokens of its prompt.
    """
    noted, span = extra.get(FIELD), (extra.get("min_global_steps"), extra.get("max_global_steps"))
    # The segments of a whole conversation begin right after the prompt; segments of only some turns do not tell of the others.
    if noted and noted[0][1] == prompt and (noted[0][0], noted[-1][0]) == span and all(at >= prompt for _, at in noted):
        return [(version, start - prompt) for version, start in noted]
    # Where the versions differ, nobody says at which token the weights changed.
    return [(span[0] if span[0] == span[1] else None, 0)]
