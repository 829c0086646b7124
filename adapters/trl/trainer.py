"""GRPOTrainer and RLOOTrainer with the `mismatch:` block.

Order of a rollout: here `_generate_and_score_completions` (engine -> records -> gap), in `metrics.py` `log` (metrics ->
loggers and run directory).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.transformers.lr import LrCallback
from mismatch_ext.adapters.trl.arrival import ArrivalCallback, sections_in_loss
from mismatch_ext.adapters.trl.behavior import check_loss
from mismatch_ext.adapters.trl.checkpoint import CheckpointMixin
from mismatch_ext.adapters.trl.clipping import clips_engine_ratio, phantom
from mismatch_ext.adapters.trl.config import MismatchConfigMixin
from mismatch_ext.adapters.trl.correction import CorrectionTerm, baseline_shift, native_options
from mismatch_ext.adapters.trl.examining import ExaminingMixin
from mismatch_ext.adapters.trl.forward_hooks import KEY
from mismatch_ext.adapters.trl.kl import BASELINE, KlReward, batch_baseline, needs_baseline
from mismatch_ext.adapters.trl.lr import LrMixin
from mismatch_ext.adapters.trl.metrics import MetricsMixin
from mismatch_ext.adapters.trl.objective import ObjectiveMixin
from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.passes import RolloutPass, watched_batch
from mismatch_ext.adapters.trl.preflight import PreflightMixin
from mismatch_ext.adapters.trl.refusals import (
    STITCHING,
    EngineRefusals,
    check_images,
    check_objective,
    check_peers,
)
from mismatch_ext.adapters.trl.sampling_mask import KEY as MASKS
from mismatch_ext.adapters.trl.sampling_mask import mean_size
from mismatch_ext.adapters.trl.turns import TurnsMixin
from torch import Tensor
from transformers import TrainingArguments
from trl import GRPOTrainer, RLOOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.kl import KlTerm, kl_sums
from mismatch_ext.names import PREFIX
from mismatch_ext.patching import applied, described, digest_of
from mismatch_ext.presets import resolve
from mismatch_ext.ranks import together
from mismatch_ext.rng import forked_rng
from mismatch_ext.rollout import Batch, collate, expect_present
from mismatch_ext.sums import over_ranks
from mismatch_ext.verdicts import Verdicts
from mismatch_ext.versions import installed, require

OLD, ROLLOUT = "old_per_token_logps", "sampling_per_token_logps"
FORWARD_KEYS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


if TYPE_CHECKING:
    from trl import GRPOTrainer as _Host
else:
    _Host = object


# In any order: no two of these override the same method but for `compute_loss`, where the routes must be in place before TRL's
# runs, and its result is proven afterwards. `ArrivalMixin` derives from `RoutingMixin` for that.
class MismatchTrainerMixin(
    PreflightMixin,
    MetricsMixin,
    CheckpointMixin,
    ObjectiveMixin,
    LrMixin,
    ExaminingMixin,
    TurnsMixin,
    _Host,
):
    """Adds the `mismatch:` block to a GRPOTrainer or to a subclass of one.

    Put it first among the bases: `class MyTrainer(MismatchTrainerMixin, MyGRPOTrainer): ...`. Without a block every
    method passes straight on.
    """

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        config: Any = kwargs.get("args") or next((a for a in args if isinstance(a, MismatchConfigMixin)), None)
        self._block: MismatchConfig | None = (
            config.mismatch_block() if isinstance(config, MismatchConfigMixin) else None
        )
        if self._block is None:
            if not isinstance(config, MismatchConfigMixin):
                given = next((type(a).__name__ for a in (config, *args) if isinstance(a, TrainingArguments)), "no args")
                warnings.warn(
                    f"{type(self).__name__} with {given}: nothing is measured, and training is TRL's own. Use "
                    "MismatchGRPOConfig(mismatch={...}), or MismatchRLOOConfig for RLOO.",
                    stacklevel=2,
                )
            super().__init__(model, *args, **kwargs)
            return
        self._verdicts = Verdicts(self._block.level)
        self._verdicts.add(config._verdicts.unwritten, warned=True)
        check_objective(type(self), self._block)
        for peer in ("torch", "transformers", "accelerate", "trl", *(("vllm",) if config.use_vllm else ())):
            if installed(peer) is None:
                require(peer)  # without it there is nothing to observe either
        with self._verdicts.checking("versions"):
            server = config.vllm_mode == "server"
            stitches = any(kwargs.get(key) for key in STITCHING)
            check_peers(type(self), self._block, use_vllm=config.use_vllm, server=server, stitches=stitches)
            check_loss(type(self), self._block, getattr(config, "loss_type", ""))
        check_images(self._block, args, kwargs)
        self._open_log(config.output_dir)
        self._masking = self._block.sampling_mask
        if self._block.kl is not None:
            self._kl = KlTerm(self._block.kl, config.beta)
        patched = self._verdicts.around("patches", applied(*self._construction_patches(config)))
        building = overridden(self, _constructing=True)
        with config.claimed(), building, patched as patches, EngineRefusals(self._block):
            # The patches of each step are checked here, before a model or an engine is built.
            self._patches = [] if patches is None else [*patches, *described(*self._step_patches(config))]
            with self._rewarding(config, args, kwargs) as (args, kwargs):
                super().__init__(model, *args, **kwargs)
        if self._block.lr is not None:
            self._lr = LrCallback(self._block.lr)
            self.add_callback(self._lr)
        self._in_loss = sections_in_loss(self._block)
        self._around_loss = self._kl is not None or bool(self._in_loss)
        if self._in_loss:
            self.add_callback(ArrivalCallback(self))
        if self._block.correction is not None:
            settings = resolve(self._block.correction)
            if native_options(settings) is None:
                self._correction = CorrectionTerm(settings, self._ranks)
        self._begin("none" if patches is None else digest_of(self._patches))

    @contextlib.contextmanager
    def _rewarding(self, config: Any, args: Any, kwargs: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yield the constructor's arguments, with the KL penalty among the reward functions when it is to be there."""
        if self._config.kl is None or not self._config.kl.in_rewards:
            yield args, kwargs
            return
        functions = kwargs["reward_funcs"] if "reward_funcs" in kwargs else args[0] if args else None
        if functions is None or any(kwargs.get(key) for key in STITCHING):
            raise ConfigError(
                "mismatch.kl.reward_path='rewards' with tools, an environment or a rollout_func: which tokens are the "
                "policy's is not known when rewards are computed; use reward_path='surrogate'."
            )
        self._kl_reward = KlReward()
        with_kl = [*(functions if isinstance(functions, list) else [functions]), self._kl_reward]
        args = args if "reward_funcs" in kwargs else (with_kl, *args[1:])
        kwargs = dict(kwargs)
        if "reward_funcs" in kwargs:
            kwargs["reward_funcs"] = with_kl
        if (processing := kwargs.get("reward_processing_classes")) is not None:
            kwargs["reward_processing_classes"] = [
                *(processing if isinstance(processing, list) else [processing]),
                None,
            ]
        weights = config.reward_weights
        with overridden(config, reward_weights=None if weights is None else [*weights, 1.0]):
            yield args, kwargs

    # One rollout batch.

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate, then measure the gap between the engine's log-probabilities and the trainer's."""
        if self._block is None:
            return super()._generate_and_score_completions(inputs)
        batch = RolloutPass()
        keeping = self.vllm_generation.keeping(batch.records) if self._verified else contextlib.nullcontext()
        with overridden(self, _rollout_pass=batch), keeping:
            return self._generated(inputs, batch)

    def _generated(self, inputs: list[dict[str, Any]], batch: RolloutPass) -> dict[str, Any]:
        """Generate and score a batch as TRL does, then measure it, correct it and adapt to it."""
        if self._kl is not None:
            self._begin_kl(self._kl)
        if self.use_vllm:
            with self._verdicts.checking("sampling"), together(self._ranks):
                self._follow_sampling()
        rewarded = self._kl_reward is not None
        # RLOO does not return its log-probabilities at sampling time.
        watched = rewarded or isinstance(self, RLOOTrainer)
        passes = self._masked_passes
        with watched_batch(self, batch) if watched else contextlib.nullcontext():
            output = super()._generate_and_score_completions(inputs)
        with together(self._ranks):
            if self._routing is not None:
                output[KEY] = self._batch_routes(batch, output)
            if self._masking is not None:
                output[MASKS] = masks = self._batch_masks(batch, output)
                if output.get(OLD) is not None and self._masked_passes == passes:
                    raise RecordError(
                        f"mismatch.sampling_mask: {OLD} come from no pass over all rows of the batch, so that they are of the "
                        "whole vocabulary. Score a batch in one call of _get_per_token_logps_and_entropies; batch_size takes "
                        "less memory."
                    )
        if self._masking is not None:
            self._metrics["train" if self.model.training else "eval"][PREFIX + "sampling_mask_size"].append(
                mean_size(masks, self._ranks, output["completion_ids"].device)
            )
        mask = output["completion_mask"]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        training = self.model.training
        gap = None
        if self.use_vllm:
            split, records = "train" if training else self._eval_split, None
            with together(self._ranks), self._verdicts.checking("records"):
                records = self._check_records(output, batch)
            with self._verdicts.checking("gap"):
                with together(self._ranks):
                    # First, because ranks that share a model take this pass together.
                    old_logprobs = self._old_logprobs(output)
                    if ROLLOUT not in output:
                        output[ROLLOUT] = self._recorded_logprobs(records, mask)
                    found = (old_logprobs, output[ROLLOUT], mask.bool())
                    self._log.observe(split, *found)
                gap = found  # on all ranks or none, because what follows is over all of them
                with together(self._ranks):
                    self._examine(output, found, None if records is None else batch.records)
            if self._routing is not None and self._routing.draws.native_gap():
                with overridden(self, _routing=None):
                    native = self._score_again(output)
                with together(self._ranks):
                    self._log.observe(split, native, output[ROLLOUT], mask.bool(), native=True)
            if self._correction is not None:
                mode = "train" if training else "eval"
                figures = self._correction.apply(output, old_logprobs, mask)
                if (shift := baseline_shift(output, mask, self._ranks)) is not None:
                    figures = figures | {"rejected_adv_shift": shift}
                for name, value in figures.items():
                    self._metrics[mode][PREFIX + name].append(value)
            if (ratio := output.get("importance_sampling_ratio")) is not None:
                with self._verdicts.checking("correction"):
                    self._log.mask(split, ratio, mask)
            if training and gap is not None and isinstance(self, GRPOTrainer):
                clips = clips_engine_ratio(
                    None if self._correction is None else self._correction.settings, self.loss_type
                )
                with self._verdicts.checking("gap"):
                    for name, value in phantom(self, output, gap, clips, self._ranks).items():
                        self._metrics["train"][PREFIX + name].append(value)
        if training:
            self._steer_by_rollouts(self._metrics["train"], gap)
        if self._kl is not None and self._kl.coef:
            self._follow_batch(self._kl, output, mask, batch, gap)
        return output

    def _follow_batch(
        self, term: KlTerm, output: dict[str, Any], mask: Tensor, batch: RolloutPass, gap: tuple[Tensor, ...] | None
    ) -> None:
        """Give the rows of a batch their baseline, and its KL to the controller."""
        adapts, needed = term.adaptive and self.model.training, needs_baseline(term)
        if not (adapts or needed):
            return
        old = self._old_logprobs(output) if gap is None else gap[0]
        if needed:
            pad = self._tokenizer.pad_token_id
            output[BASELINE] = batch_baseline(term, output, old, mask, batch.generated, pad, self._ranks)
        if adapts:
            with together(self._ranks):
                sums = kl_sums(old, output["ref_per_token_logps"], mask)
            term.add(over_ranks(sums, self._ranks))

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """Compute rewards as TRL does; a completion that no other reward function scores gets no KL reward either."""
        if self._kl_reward is None:
            stock: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return stock
        with overridden(self._kl_reward, penalties=self._kl_penalties(completion_ids_list)):
            rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        column = next(i for i, function in enumerate(self.reward_funcs) if function is self._kl_reward)
        others = torch.cat([rewards[:, :column], rewards[:, column + 1 :]], dim=1)
        rewards[others.isnan().all(dim=1), column] = torch.nan
        return rewards

    def _check_records(self, output: dict[str, Any], rollouts: RolloutPass) -> Batch:
        """Return the rollouts, refusing those not of the present weights, or not the tokens being trained on."""
        records, completions = rollouts.records, len(output["completion_ids"])
        if len(records) != completions:
            raise RecordError(
                f"{completions} completions, of which {len(records)} were recorded as they were sampled: something samples "
                "without trainer.vllm_generation.generate, or rows are dropped or added below this trainer. Generate with that, "
                "and put a class that changes rows first: class T(Yours, MismatchGRPOTrainer)."
            )
        batch = collate(records)
        expect_present(batch.provenance, self.vllm_generation.weight_version)
        sampled, mask = batch.response_ids, batch.response_mask
        trained = output["completion_ids"][:, : sampled.shape[1]].cpu()
        if not torch.equal(trained[mask], sampled[mask]):
            row = int(((trained != sampled) & mask).any(1).nonzero()[0])
            raise RecordError(f"row {row}: the tokens to be trained on are not those that the engine sampled.")
        return batch

    def _recorded_logprobs(self, records: Batch | None, mask: Tensor) -> Tensor:
        """Return the engine's log-probabilities `[B, T]` of a trainer that drops them, padded as its completions are."""
        if records is None:
            raise RecordError(
                f"{type(self).__name__} keeps no log-probabilities of the engine, and its completions are stitched from several "
                "generations: there is no gap to measure. Remove the mismatch block, or what stitches them."
            )
        found = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        found[:, : records.rollout_logprobs.shape[1]] = records.rollout_logprobs.to(mask.device)
        return found

    def _old_logprobs(self, output: dict[str, Any]) -> Tensor:
        """Return the trainer's log-probabilities at sampling time `[B, T]`, as TRL computed them if it did."""
        if OLD in output:
            found: Tensor = output[OLD]
            return found
        batch = self._rollout_pass
        if batch is not None and batch.scored:
            tokens = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
            attention_mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            length = output["completion_ids"].size(1)
            own = batch.of_policy(self.model, lambda scored: scored.is_of(tokens, attention_mask, length))
            if own is not None:
                return own.scores[0]  # the host's, which returns their sums only
        return self._score_again(output) if batch is None or batch.policy is None else batch.policy

    def _score_again(self, output: dict[str, Any]) -> Tensor:
        """Return the trainer's log-probabilities `[B, T]` by a pass of our own."""
        completion_ids = output["completion_ids"]
        # TRL skips this forward when importance sampling is off; measuring must then not move its random numbers.
        with torch.no_grad(), forked_rng(self.accelerator.device):
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], completion_ids], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                completion_ids.size(1),
                # The batch size of TRL's own pass, because another one can round differently.
                batch_size=(
                    self.args.per_device_train_batch_size
                    if self.model.training
                    else self.args.per_device_eval_batch_size
                ),
                **{key: output[key] for key in FORWARD_KEYS if key in output},
            )
        return logps


class MismatchGRPOTrainer(MismatchTrainerMixin, GRPOTrainer):
    """Drop-in `GRPOTrainer` that takes a `MismatchGRPOConfig`."""


class MismatchRLOOTrainer(MismatchTrainerMixin, RLOOTrainer):  # type: ignore[misc]  # vllm_generation, as in PreflightMixin
    """Drop-in `RLOOTrainer` that takes a `MismatchRLOOConfig`: precision, routing, lr and monitor."""
