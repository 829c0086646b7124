"""slime's `--save-debug-rollout-data PATH` (and `--dump-details`): one file per rollout, made by `torch.save`.

`save_debug_rollout_data` of `slime/observability/rollout_data_utils.py` writes it, with `Sample.to_dict` of
`slime/utils/types.py` (THUDM/slime, commit 624b824a898ab0ec1fcb4d373004c7f3852bf515): `{"rollout_id": ..., "samples":
[...]}`. `tokens` covers prompt and response; `loss_mask` and `rollout_log_probs` cover only the response.
`rollout_routed_experts` has, for each token but the last, a row `[layers, K]` over all decoder layers.
"""

from __future__ import annotations

import codecs
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mismatch_ext.errors import RecordError
from mismatch_ext.rollouts.fields import ensure_keys, flags, logprobs, token_ids
from mismatch_ext.rollouts.logged import Logged, LoggedResponse, LoggedRoutes

HOST = "slime"
MAGIC = b"PK\x03\x04"
# Rewards are often numpy numbers; unpickling these cannot run code from the file.
NUMBERS: list[Any] = [np.float64(0).__reduce__()[0], np.dtype, codecs.encode]
NUMBERS += [type(np.dtype(kind)) for kind in ("bool", "int32", "int64", "float32", "float64")]


def read(path: str) -> Logged:
    """Read a file; objects in it that could run code are not unpickled.

    Raises:
        RecordError: The file is damaged, is not slime's, holds objects other than numbers, texts and tensors, or lacks what
            the doctor needs; names sample and field.
    """
    try:
        with torch.serialization.safe_globals(NUMBERS):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RecordError(
            f"{path} holds objects that are not unpickled, since a file could run code by them: {_line(error)}; leave them out "
            "of slime's Sample.metadata, or write records with mismatch_ext.rollouts.write_rollouts."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise RecordError(f"{path} is a damaged file of torch.save: {_line(error)}") from error
    samples = found.get("samples") if isinstance(found, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise RecordError(
            f"{path} is a file of torch.save, and not as slime's --save-debug-rollout-data writes it, with a list of `samples`."
        )
    rows = [_row(sample, f"{path}, sample {number}") for number, sample in enumerate(samples)]
    kept = tuple(row for row in rows if row is not None)
    return Logged(path=path, host=HOST, responses=kept, left_out=len(rows) - len(kept))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _row(sample: Mapping[str, Any], where: str) -> LoggedResponse | None:
    ensure_keys(sample, ("tokens", "response_length"), where, "is it one of slime's?")
    length = sample["response_length"]
    if length == 0:
        return None
    ensure_keys(
        sample, ("rollout_log_probs",), where, "slime logs them unless a generate function of one's own leaves them out"
    )
    ids = token_ids(sample, "tokens", where)
    if type(length) is not int or not 0 < length < len(ids):
        raise RecordError(
            f"{where}: response_length {length!r} is not between 1 and its {len(ids)} tokens, less a prompt."
        )
    mask = (True,) * length if sample.get("loss_mask") is None else flags(sample, "loss_mask", where)
    if not any(mask):
        return None
    return LoggedResponse(
        where=where,
        prompt_ids=ids[:-length],
        response_ids=ids[-length:],
        mask=mask,
        logprobs=logprobs(sample, "rollout_log_probs", where),
        versions=tuple(map(str, sample.get("weight_versions") or ())),
        routes=_routes(sample.get("rollout_routed_experts"), where),
    )


def _routes(found: Any, where: str) -> LoggedRoutes | None:
    if found is None:
        return None
    try:
        experts = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{where}: rollout_routed_experts cannot be read: {error}") from error
    if experts.dim() != 3 or experts.is_floating_point():
        raise RecordError(
            f"{where}: rollout_routed_experts is {experts.dtype} {tuple(experts.shape)}; it must be integers [tokens, layers, "
            "experts]."
        )
    return LoggedRoutes(experts=experts.numpy())
