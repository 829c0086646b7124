"""`monitor.doctor` in verl's worker: ranks gather the weights that the rollout is sent, and rank 0 examines rows with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from mismatch_ext.adapters.transformers.doctor_in_run import (
    Computing,
    Rows,
    SentWeights,
    class_of,
    copy_of,
    examine_batch,
)
from mismatch_ext.adapters.verl.worker import samples
from mismatch_ext.adapters.verl.worker.measuring import MASK, ROLLOUT
from mismatch_ext.adapters.verl.worker.replay import FIELD, EngineReplay
from mismatch_ext.adapters.verl.worker.staleness import EXTRA, PROMPTS
from torch import Tensor
from verl.utils.device import get_device_id, get_device_name

from mismatch_ext.doctor import Diagnosis
from mismatch_ext.errors import RecordError
from mismatch_ext.routing import RoutingTrace

OLD, RESPONSES = "old_log_probs", "responses"


def sent_weights(engine: Any) -> SentWeights | None:
    """Gather an engine's present weights as the rollout is sent them; every rank must call this, and only rank 0 keeps them."""
    sent = SentWeights() if engine.rank == 0 else None
    weights, _ = engine.get_per_tensor_param()
    for name, tensor in weights:
        if sent is not None:
            sent.note(name, tensor)
    return sent


def fetched(keys: Sequence[str], partition: str, *, routes: bool) -> Mapping[str, Any]:
    """Return the fields of rows that are examined, from verl's TransferQueue.

    Args:
        keys: The rows' keys.
        partition: The batch's partition.
        routes: Whether the rows were sampled with routes.
    """
    wanted = [PROMPTS, RESPONSES, MASK, ROLLOUT, OLD, *([FIELD, EXTRA] if routes else [])]
    found: Mapping[str, Any] = tq.kv_batch_get(keys=list(keys), partition_id=partition, select_fields=wanted)
    return found


def examined(
    engine: Any, sent: SentWeights, fields: Mapping[str, Any], *, engine_dtype: str, temperature: float
) -> Diagnosis:
    """Say why the trainer differs from the rollout on rows of a batch.

    Args:
        engine: verl's, with the weights that have scored the rows.
        sent: Those weights, as the rollout is sent them.
        fields: As `fetched` returns them, nested tensors.
        engine_dtype: What the rollout computes in.
        temperature: What the trainer divides logits by.

    Raises:
        MismatchError: The rows or the weights are not what they should be.
    """
    replay: EngineReplay | None = engine._replay
    replays = replay is not None and replay.config.mode == "R3"
    if replay is not None:
        replay.weight_version = engine.weight_version
    rows = _rows(fields, replay if replays else None)
    # FSDP gathers its weights in the dtype that it computes in.
    dtype = str(engine._autocast_dtype).removeprefix("torch.")
    computing = Computing(
        trainer_dtype=dtype, trainer_weights=dtype, engine_dtype=engine_dtype, temperature=temperature, replays=replays
    )
    cuda = get_device_name() == "cuda"
    device = torch.device("cuda", get_device_id()) if cuda else torch.device("cpu")
    module = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
    return examine_batch(rows, computing, copy_of(sent.take(), class_of(module), module.config, device))


def _rows(fields: Mapping[str, Any], replay: EngineReplay | None) -> Rows:
    parts: dict[str, list[Tensor]] = {}
    for name in (PROMPTS, RESPONSES, MASK, ROLLOUT, OLD):
        if fields[name] is None:
            raise RecordError(f"the batch has no {name}: the doctor asks both sides about the same tokens.")
        parts[name] = [row.cpu() for row in fields[name].unbind()]
    routes: list[RoutingTrace] | None = None
    if replay is not None:
        whole = [torch.cat(pair).int() for pair in zip(parts[PROMPTS], parts[RESPONSES], strict=True)]
        names = [f"examined row {row}" for row in range(len(whole))]
        # Up to the last token that is judged; behind it an agent loop may have put tokens that no engine saw.
        lasts = [int(mask.nonzero()[-1]) for mask in parts[MASK]]
        needed = [len(prompt) + last for prompt, last in zip(parts[PROMPTS], lasts, strict=True)]
        found = replay.ingest(samples.routes(fields), whole, needed, names, samples.versions(fields))
        routes = [own.trace.slice(0, len(ids) - 1) for own, ids in zip(found, whole, strict=True)]
    return Rows(
        prompts=[row.tolist() for row in parts[PROMPTS]],
        responses=[row.tolist() for row in parts[RESPONSES]],
        masks=[row.bool().tolist() for row in parts[MASK]],
        engine=[row.double().tolist() for row in parts[ROLLOUT]],
        trainer=[row.double().tolist() for row in parts[OLD]],
        routes=routes,
    )
