"""`mismatch.level: observe` in TRL: it looks at what stock TRL has made of a batch, and changes nothing.

TRL's methods run as they are. Everything here comes after them, on copies of what they returned, under `Verdicts.checking`: what
raises is a finding, whatever it is. What a section would have changed is computed beside the run and logged as `enforce/...`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from mismatch_ext.adapters.trl.correction import CorrectionTerm
from mismatch_ext.adapters.trl.passes import RolloutPass
from mismatch_ext.adapters.trl.replay import ScoreReplay, share
from torch import Tensor, nn

from mismatch_ext.config import MismatchConfig
from mismatch_ext.correction import correct, over_ranks
from mismatch_ext.kl import KlTerm
from mismatch_ext.ranks import Ranks
from mismatch_ext.recorder import PREFIX
from mismatch_ext.run.log import RunLog
from mismatch_ext.verdicts import ENFORCE, Finding, Verdicts

if TYPE_CHECKING:
    from mismatch_ext.adapters.trl.generation import CheckedGeneration
    from trl import GRPOTrainer as _Host
else:
    _Host = object

ROLLOUT = "sampling_per_token_logps"
Gap = tuple[Tensor, Tensor, Tensor]


class ObservingMixin(_Host):
    """Measures batches of stock TRL; `MismatchTrainerMixin` sets what is watched."""

    _block: MismatchConfig | None
    _verdicts: Verdicts
    _ranks: Ranks
    _log: RunLog
    _eval_split: str
    # These would correct, penalise and replay; here they only measure.
    _watched_correction: CorrectionTerm | None = None
    _watched_kl: KlTerm | None = None
    _watched_routing: ScoreReplay | None
    _no_reference_told = False

    vllm_generation: CheckedGeneration  # type: ignore[assignment]  # around TRL's own
    model: nn.Module

    if TYPE_CHECKING:

        @property
        def _verified(self) -> bool: ...
        def _check_records(self, output: dict[str, Any], rollouts: RolloutPass) -> Any: ...
        def _recorded_logprobs(self, records: Any, mask: Tensor) -> Tensor: ...
        def _examine(self, output: Mapping[str, Any], gap: Gap, records: Any) -> None: ...
        def _old_logprobs(self, output: dict[str, Any]) -> Tensor: ...
        def _steer_by_rollouts(self, metrics: Mapping[str, list[float]], gap: Gap | None) -> None: ...

    def _measured(self, inputs: list[dict[str, Any]], rollouts: RolloutPass) -> dict[str, Any]:
        """Generate and score a batch as TRL does, and measure the result."""
        refused = self._verdicts.counts["records"]
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        with self._verdicts.checking("measuring"):
            self._measure(output, rollouts, compared=self._verified and self._verdicts.counts["records"] == refused)
        return output

    def _measure(self, output: Mapping[str, Any], rollouts: RolloutPass, *, compared: bool) -> None:
        """Measure a batch that TRL has generated and scored.

        Args:
            output: What TRL made of it.
            rollouts: What was kept of the batch.
            compared: Whether records of the batch were kept, and none was refused.
        """
        seen = dict(output)  # entries are added for our own functions, and none of TRL's tensors is changed
        training = self.model.training
        split = "train" if training else self._eval_split
        mask = seen["completion_mask"] * seen.get("tool_mask", 1)
        batch, gap = None, None
        if compared:
            with self._verdicts.checking("records"):
                batch = self._check_records(seen, rollouts)
        if self.use_vllm:
            with self._verdicts.checking("gap"):
                if ROLLOUT not in seen:
                    seen[ROLLOUT] = self._recorded_logprobs(batch, mask)
                found = (self._old_logprobs(seen), seen[ROLLOUT], mask.bool())
                self._log.observe(split, *found)
                gap = found
                self._examine(seen, found, rollouts.records if batch is not None else None)
        if self.accelerator.num_processes > 1 and not all(gather_object([gap is not None])):
            gap = None  # what follows is over all ranks
        if self._watched_routing is not None and batch is not None:
            with self._verdicts.checking("routes"):
                self._compare_routes(self._watched_routing, seen, rollouts.records, split)
        if self._watched_correction is not None and gap is not None:
            self._would_correct(self._watched_correction, gap, "train" if training else "eval")
        if training:
            with self._verdicts.checking("lr"):
                self._steer_by_rollouts(self._metrics["train"], gap)
        if self._watched_kl is not None:
            self._would_penalise(self._watched_kl, seen, gap, mask, training)

    def _compare_routes(
        self, routing: ScoreReplay, seen: Mapping[str, Any], records: Sequence[Any], split: str
    ) -> None:
        """Compare the engine's experts with those that the trainer chooses for the same tokens, in a pass of our own."""
        if not routing.draws.comparison():
            return
        routes = [record.routing for record in records if record.routing is not None]
        if len(routes) < len(records):
            return  # not recorded, or refused already
        traces = share(routes, [record.prompt_ids for record in records])
        size = self.args.per_device_train_batch_size if split == "train" else self.args.per_device_eval_batch_size
        routing.compare_scored(
            self._get_per_token_logps_and_entropies,
            self.model,
            torch.cat([seen["prompt_ids"], seen["completion_ids"]], dim=1),
            torch.cat([seen["prompt_mask"], seen["completion_mask"]], dim=1),
            seen["completion_ids"].size(1),
            size,
            traces=traces,
            split=split,
        )

    def _would_correct(self, term: CorrectionTerm, gap: Gap, mode: str) -> None:
        """Log the weights that `correction` would have given to a batch."""
        old, rollout, mask = gap
        found: Mapping[str, float] = {}
        with self._verdicts.checking("correction"):
            if bool(mask.any()):
                found = correct(rollout, old, mask, term.settings).metrics
        with self._verdicts.checking("correction"):
            for name, value in over_ranks(found, mask, term.settings, self._ranks).items():
                self._metrics[mode][PREFIX + ENFORCE + name].append(value)

    def _would_penalise(
        self, term: KlTerm, seen: dict[str, Any], gap: Gap | None, mask: Tensor, training: bool
    ) -> None:
        """Log the KL to the reference, where TRL itself has scored one, and the coefficient that `kl` would have."""
        reference = seen.get("ref_per_token_logps")
        if reference is None:
            if not self._no_reference_told:
                self._no_reference_told = True
                message = "mismatch.kl is not measured: without beta TRL scores no reference, which enforce would have loaded."
                self._log.event("info", "kl", message)
            return
        with self._verdicts.checking("kl"):
            term.begin()
            old = self._old_logprobs(seen) if gap is None else gap[0]
            if term.adaptive and training:
                term.adapt(old, reference, mask, self._ranks)
            for name, value in term.measure(old, reference, mask, self._ranks).items():
                self._metrics["train" if training else "eval"][PREFIX + ENFORCE + name].append(value)

    def _findings_of_ranks(self) -> None:
        """Bring the findings of the other ranks to the main process, which writes; all ranks must call this."""
        if not self._verdicts.observes or self.accelerator.num_processes == 1:
            return
        mine: list[Finding] = [] if self.accelerator.is_main_process else self._verdicts.take()
        for findings in gather_object([mine]):
            if self.accelerator.is_main_process:
                self._verdicts.add(findings, said=True)
