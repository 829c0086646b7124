"""`monitor.doctor` in TRL: a measured batch is examined in the main process, on a copy of the weights that were sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.placeholders import placeholders_of
from mismatch_ext.adapters.transformers.attention import implementation_of
from mismatch_ext.adapters.transformers.doctor.in_run import (
    Computing,
    Rows,
    buffers_of,
    class_of,
    copy_of,
    examine_batch,
    unexaminable,
)
from mismatch_ext.adapters.vllm.doctor import VllmEngine
from torch import nn

from mismatch_ext.config import MismatchConfig
from mismatch_ext.doctor import Diagnosis, Sample
from mismatch_ext.doctor.in_run import EXAMINED_TOKENS, rows_within
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.names import PREFIX
from mismatch_ext.rollout import RolloutRecord

if TYPE_CHECKING:
    from mismatch_ext.adapters.trl.host import Gap
    from mismatch_ext.adapters.trl.run import TrlRun


class Examiner:
    """Examines batches of one trainer."""

    def __init__(self, run: TrlRun) -> None:
        self.run, self.trainer = run, run.trainer
        self._found: Mapping[str, float] = {}

    def examine(self, output: Mapping[str, Any], gap: Gap, records: Sequence[RolloutRecord] | None) -> None:
        """Examine a training batch where one is due; no other rank takes part, and nothing of the run is touched."""
        doctor, checked = self.run.log.doctor, self.run.checked
        if doctor is None or not doctor.due or not self.trainer.model.training or checked is None:
            return
        if checked.sent is None:
            return  # the next weight update is copied, and the batch after it examined
        found = doctor.examine(self.run.step, lambda: self._diagnosis(output, gap, records))
        self._found = {PREFIX + name: value for name, value in found.items()}

    def metrics(self) -> dict[str, float]:
        """Return what the main process has found since the last log, on every rank: all of them log the same."""
        found, self._found = dict(self._found), {}
        if self.run.block.monitor.doctor is None or self.run.ranks.size == 1:
            return found
        shared: dict[str, float] = self.run.ranks.gather(found)[0]
        return shared

    def _diagnosis(self, output: Mapping[str, Any], gap: Gap, records: Sequence[RolloutRecord] | None) -> Diagnosis:
        checked, routing, accelerator = self.run.checked, self.run.block.routing, self.trainer.accelerator
        assert checked is not None
        sent, checked.sent = checked.sent, None
        assert sent is not None
        policy = accelerator.unwrap_model(self.trainer.model)
        policy = policy.get_base_model() if hasattr(policy, "peft_config") else policy
        held: Mapping[str, int] = self.run.readings["trainer"].parameter_dtypes
        computing = Computing(
            trainer_dtype=self.run.compute_dtype,
            trainer_weights=max(held, key=held.__getitem__),
            engine_dtype=checked.reading.model_dtype,
            temperature=self.run.temperature,
            replays=routing is not None and routing.mode == "R3",
            head="float32" if getattr(self.trainer.args, "cast_lm_head_to_fp32", False) else "",
            attention=implementation_of(policy),
        )
        rows = rows_of(output, gap, records, EXAMINED_TOKENS, placeholders_of(policy.config.to_dict()))
        weights = {**buffers_of(policy), **sent.take()}
        copy = copy_of(weights, class_of(policy), policy.config, accelerator.device)
        return examine_batch(rows, computing, copy, self._scored_again())

    def _scored_again(self) -> Callable[[Sample], Sample] | None:
        """Return a function that asks the engine again; None if the engine is shared or may sleep."""
        args = self.trainer.args
        alone = args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size == 1 and not args.vllm_enable_sleep_mode
        if not alone:
            return None
        return VllmEngine.around(self.trainer.vllm_generation.llm).score


def check_examinable(block: MismatchConfig, model: nn.Module) -> None:
    """Refuse to examine a model whose copy cannot be made of what the engine is sent."""
    why = unexaminable(model.config)
    if block.monitor.doctor is not None and why is not None:
        raise ConfigError(
            f"mismatch.monitor.doctor={block.monitor.doctor!r} with {type(model).__name__}: {why}; allowed: none. Remove it."
        )


def rows_of(
    output: Mapping[str, Any],
    gap: Gap,
    records: Sequence[RolloutRecord] | None,
    most: int,
    pictured: Collection[int] = (),
) -> Rows:
    """Return the rows of a batch of TRL's that are examined, all without the tokens `pictured`, which stand for an image."""
    old, rollout, mask = (values.detach().cpu() for values in gap)
    ids = {
        name: output[name].detach().cpu() for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    }
    whole = torch.cat([ids["prompt_ids"] * ids["prompt_mask"], ids["completion_ids"] * ids["completion_mask"]], 1)
    text = ~torch.isin(whole, torch.tensor(sorted(pictured), dtype=whole.dtype)).any(1)
    if (images := output.get("num_images")) is not None:  # TRL counts them, whatever a model's tokens are called
        text &= torch.tensor(images, dtype=torch.int64) == 0
    if not text.any():
        raise RecordError("every response of the batch has an image in its prompt, which the doctor does not score.")
    chosen = rows_within((mask.sum(1) * text).tolist(), most)
    lengths = {row: int(ids["completion_mask"][row].sum()) for row in chosen}
    routes = None if records is None else [records[row].routing for row in chosen]
    known = None if routes is None else [trace for trace in routes if trace is not None]
    return Rows(
        prompts=[ids["prompt_ids"][row][ids["prompt_mask"][row].bool()].tolist() for row in chosen],
        responses=[ids["completion_ids"][row, : lengths[row]].tolist() for row in chosen],
        masks=[mask[row, : lengths[row]].bool().tolist() for row in chosen],
        engine=[rollout[row, : lengths[row]].double().tolist() for row in chosen],
        trainer=[old[row, : lengths[row]].double().tolist() for row in chosen],
        routes=known if known is not None and len(known) == len(chosen) else None,
    )
