"""`monitor.doctor`: examine a batch of a run while the run waits, by the rungs that need no engine of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.transformers.doctor.scorer import LAYOUTS, Scorer, mixes_packed
from mismatch_ext.adapters.transformers.scoring import active_dropout
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from mismatch_ext.doctor import Diagnosis, Sample, diagnose, remedy, rescored
from mismatch_ext.doctor.diagnose import SAMPLED, taken_apart
from mismatch_ext.errors import MismatchError, RecordError
from mismatch_ext.rng import forked_rng
from mismatch_ext.routing import RoutingTrace

# An accelerator must have so many times the copy's size free, beside the run: for the copy in float32, for half as much again in
# another dtype, and for activations.
ROOM = 2.0
# Dropout is what a run's own pass has if it moves the copy's by as much, up to this factor: no two passes drop the same.
ALIKE = 2.0
SHARDED = "DeepSpeed ZeRO-3, under which transformers builds no model on one rank alone"
LIMITS = (
    "examined in a run: causes that need a forward pass each were not tried (weights, configuration, cache, prompts); for those "
    "run `mismatch-ext doctor`"
)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a batch as the trainer has them, with both sides' log-probabilities; routes only if all are known."""

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    masks: Sequence[Sequence[bool]]
    engine: Sequence[Sequence[float]]
    trainer: Sequence[Sequence[float]]
    routes: Sequence[RoutingTrace] | None = None

    def sample(self) -> Sample:
        """Return the sample that the doctor examines."""
        return Sample(
            prompts=tuple(map(tuple, self.prompts)),
            responses=tuple(map(tuple, self.responses)),
            masks=tuple(map(tuple, self.masks)),
            logprobs=tuple(map(tuple, self.engine)),
            routes=None if self.routes is None else tuple(self.routes),
        )


@dataclass(frozen=True, kw_only=True)
class Computing:
    """How the two sides of a run compute, by the names of `Scorer`'s arguments."""

    trainer_dtype: str
    trainer_weights: str
    engine_dtype: str
    temperature: float
    replays: bool = False
    head: str = ""
    attention: str = ""


class SentWeights:
    """A copy in host memory of the weights that the engine is sent; the main process makes it during a weight update.

    A rank may hold only a shard, or an adapter beside its base. What is sent is the whole model under a checkpoint's names.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._failure: Exception | None = None

    def note(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor that is sent; if that fails, for example because memory is short, `take` raises the error."""
        if self._failure is not None:
            return
        try:
            self._held[name] = tensor.detach().to("cpu", torch.float32, copy=True)
        except (RuntimeError, MemoryError) as error:
            self._held, self._failure = {}, error

    def take(self) -> dict[str, Tensor]:
        """Return the copy, and forget it here.

        Raises:
            RecordError: The copy could not be made.
        """
        weights, self._held = self._held, {}
        if self._failure is not None or not weights:
            raise RecordError(f"no copy of the weights that were sent: {self._failure or 'none was sent'}.")
        return weights


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, such as a router's correction bias; no engine is sent them in an update."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def copy_of(weights: Mapping[str, Tensor], kind: type[Any], config: Any, device: torch.device) -> nn.Module:
    """Build a separate model in float32 from the weights that the engine is sent, without moving on the run's random numbers.

    It stays in host memory unless there is room for it on the device. `RecordError` if the weights do not make such a model.
    """
    if is_deepspeed_zero3_enabled():
        # It would build the model by collectives of all ranks, but only the main process is here, so they would wait forever.
        raise RecordError(f"{SHARDED}.")
    # Attention and other kernels are chosen again, because not all support float32; `Computing` keeps the run's attention.
    plain = type(config).from_dict(config.to_dict())
    with forked_rng(device):
        model, loaded = kind.from_pretrained(
            None, config=plain, state_dict=dict(weights), dtype=torch.float32, output_loading_info=True
        )
    wrong = {name: sorted(map(str, loaded[name]))[:3] for name in ("missing_keys", "mismatched_keys") if loaded[name]}
    if wrong:
        raise RecordError(f"the weights that the engine is sent do not make a {kind.__name__}: {wrong}.")
    copied: nn.Module = model.requires_grad_(False).eval()
    return copied.to(device) if _fits(weights, device) else copied


def class_of(model: nn.Module) -> type[Any]:
    """Return the class that a model was built as; FSDP2 gives the model a subclass of it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def unexaminable(config: Any) -> str | None:
    """Say why a model with a configuration cannot be examined in a run, or return None if it can."""
    if is_deepspeed_zero3_enabled():
        return SHARDED
    if getattr(config, "quantization_config", None) is not None:
        return "a model with quantized weights, of which the engine is sent no whole ones"
    return None


def _fits(weights: Mapping[str, Tensor], device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return free > ROOM * sum(4 * tensor.numel() for tensor in weights.values())


def examine_batch(
    rows: Rows, computing: Computing, model: nn.Module, again: Callable[[Sample], Sample] | None = None
) -> Diagnosis:
    """Say why the two sides differ on rows of a run's batch, as far as logits alone can tell.

    Args:
        rows: The rows.
        computing: How both sides compute.
        model: A copy of the trainer's model; it stays changed.
        again: Returns the engine's log-probabilities of the same tokens in a prompt, which confirm causes that lie in sampling;
            None if the engine cannot be asked.

    Raises:
        RecordError: The rows are malformed, or lack the routes that the trainer replays.
        NonFiniteLogprobError: A side is not finite.
    """
    if computing.replays and rows.routes is None:
        raise RecordError("the trainer replays the engine's routes, and those of the examined responses are not known.")
    sample = rows.sample()
    computed = np.concatenate(
        [
            np.asarray(row, dtype=np.float64)[np.asarray(mask)]
            for row, mask in zip(rows.trainer, rows.masks, strict=True)
        ]
    )
    scorer = Scorer(model, sample, **vars(computing), computed=computed)
    diagnosis = diagnose(sample, scorer.scores)
    if any(cause.key == "layout" for cause in diagnosis.causes):
        diagnosis = _taken_apart(diagnosis, scorer, computed, computing.replays)
    diagnosis = replace(diagnosis, notes=(*diagnosis.notes, LIMITS))
    families = {cause.family for cause in diagnosis.mendable if cause.family in SAMPLED}
    if again is None or not families:
        return diagnosis
    try:
        scored = replace(again(sample), routes=sample.routes)
    except MismatchError as error:
        return replace(diagnosis, notes=(*diagnosis.notes, f"the remedy could not be tried: {error}"))
    left, after = rescored(scored, scorer.rescored(scored))
    return diagnosis.confirmed(families, left, after)


def _taken_apart(diagnosis: Diagnosis, scorer: Scorer, computed: np.ndarray, replays: bool) -> Diagnosis:
    """Try what a run's pass may do that a plain one does not: other layouts of the batch, and dropout."""
    routes = scorer.sample.routes if replays else None

    def scored(layout: str) -> np.ndarray:
        return scorer.in_layout(scorer.sample, layout, routes=routes)

    plain = scored("right")
    if active := active_dropout(scorer.model):
        with forked_rng(next(scorer.model.parameters()).device):
            dropped = scorer.in_layout(scorer.sample, "right", routes=routes, training=True)
        moved, gap = float(np.abs(dropped - plain).mean()), float(np.abs(computed - plain).mean())
        if gap / ALIKE <= moved <= gap * ALIKE:
            reason = (
                f"dropout is active in the run's own pass ({', '.join(active)}): it moves this model by {moved:.1e}, and the "
                f"pass is off by {gap:.1e}"
            )
            causes = tuple(
                replace(cause, key="dropout", said=reason, remedy=remedy("dropout")) if cause.key == "layout" else cause
                for cause in diagnosis.causes
            )
            return replace(diagnosis, causes=causes)
    names = {"left": "layout", "left-positions": "", "packed": "packed"}
    if mixes_packed(scorer.model):
        del names["packed"]
    return taken_apart(
        diagnosis, computed, plain, {LAYOUTS[layout]: (name, scored(layout)) for layout, name in names.items()}
    )
