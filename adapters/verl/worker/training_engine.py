"""verl's FSDP engine with the block: routing replay, loss scaling, learning-rate control and their state in checkpoints.

verl's registry looks engines up by device and vendor first, so that `VERL_ENGINE_VENDOR=mismatch` takes this one and
`actor.strategy` stays as it is. Without a block the engine does what its parent does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import ItemsView, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from mismatch_ext.adapters.verl.block import RunMode
from mismatch_ext.adapters.verl.replay import EngineReplay
from mismatch_ext.adapters.verl.worker.logprobs import LogprobsMixin
from mismatch_ext.adapters.verl.worker.lr import REQUIRED, warmup_steps
from mismatch_ext.adapters.verl.worker.masks import MaskMixin
from mismatch_ext.adapters.verl.worker.scaler import (
    check_precision,
    refuse_disabled,
    scaler_metrics,
    scaler_report,
)
from mismatch_ext.adapters.verl.worker.steered import SteeredMixin, register
from mismatch_ext.patches.verl.response_logprobs import RESPONSE_LOGPROBS
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.lr import LrControl, warn_of_short_training
from mismatch_ext.patching import described
from mismatch_ext.precision.scaler import LossScaler
from mismatch_ext.verdicts import Verdicts
from mismatch_ext.versions import installed


class MismatchFSDPEngine(MaskMixin, LogprobsMixin, SteeredMixin, FSDPEngineWithLMHead):
    """verl's FSDP engine with the block: FSDP1 (`strategy: fsdp`) or FSDP2.

    Raises:
        ConfigError: This engine cannot do what the block asks for.
    """

    scaler: Any
    replay: EngineReplay | None = None
    _adapter_off = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = self.run_block
        # Under `observe` the engine computes as verl's own does, and is only looked at.
        self.verdicts = Verdicts("enforce" if given is None else given.level)
        self.block = None if self.verdicts.observes else given
        self._looked_at = given is not None
        self._steps = self._skipped = self._updates = 0
        self._of_step = [0, 0]  # updates of the present step that were skipped, and that were not
        self._behind = 0  # skipped updates of steps that had others, too: the schedule is behind by as many
        self._mode = self.run_mode
        if given is not None:
            with self.verdicts.checking("engine"):
                self._check_setup(given.acting)

    def _check_setup(self, block: MismatchConfig) -> None:
        if self.model_config.use_fused_kernels and self.engine_config.strategy == "fsdp2" and not self._tied:
            raise ConfigError(
                "model.use_fused_kernels=True with strategy='fsdp2', of a model whose output layer is not its embeddings': "
                'verl 0.9.1 shards that layer by itself, and its fused head then multiplies by a shard ("mixed torch.Tensor and '
                'DTensor"); set actor_rollout_ref.actor.strategy=fsdp and actor_rollout_ref.ref.strategy=fsdp.'
            )
        if block.routing is not None and self.use_ulysses_sp and hasattr(self.model_config.hf_config, "vision_config"):
            raise ConfigError(
                f"ulysses_sequence_parallel_size={self.ulysses_sequence_parallel_size} with mismatch.routing, of a model with "
                "images: verl cuts its sequence inside the model, behind the tokens that routes are held against; allowed: 1."
            )
        dtype = "bfloat16" if block.precision is None else block.precision.dtype
        if dtype != "bfloat16" and self._trains and self._is_lora and self.model_config.lora.get("merge"):
            raise ConfigError(
                f"mismatch.precision.dtype={dtype!r} with model.lora.merge=True: verl sends merged weights to the rollout engine "
                "in bfloat16; set model.lora.merge=False."
            )

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))

    def initialize(self) -> None:
        """Build model, optimizer and schedule as the parent does, and put the block on them.

        Raises:
            ConfigError: The engine computes in another dtype than the block asks for.
            ReplayError: The model's routing cannot be replayed.
        """
        super().initialize()
        block = self.block
        if self._looked_at and self._trains:
            with self.verdicts.checking("loss_scaler"):
                refuse_disabled(self.scaler, get_device_name())
        if block is None:
            return
        if block.precision is not None:
            check_precision(block.precision, _name(self._autocast_dtype), "actor" if self._trains else "ref")
        if block.routing is not None and (self._trains or block.routing.reference):
            self.replay = EngineReplay(
                block.routing, self.module, int(self.engine_config.seed), int(self.ulysses_sequence_parallel_size)
            )
            self.replay.takes_older = self._mode.asynchronous
        if not self._trains:
            return
        self.optimizer.register_step_post_hook(self._count_step)
        if block.lr is not None:
            self._rate = LrControl(
                block.lr,
                self.optimizer,
                warmup=math.ceil(warmup_steps(self.optimizer_config) / self._mode.updates),
                # Local updates between two weight updates are one step of the rule, even if some of them were skipped.
                updates=lambda: (int(self.lr_scheduler.last_epoch) + self._behind) // self._mode.updates,
                required=REQUIRED,
            )
            warn_of_short_training(block.lr, int(self.optimizer_config.total_training_steps))

    def _build_fsdp_module(self, module: Any) -> Any:
        precision = None if self.block is None else self.block.precision
        if precision is None:
            return super()._build_fsdp_module(module)
        with warnings.catch_warnings():
            # verl's scaler warns so when it disables itself without CUDA; it is replaced below.
            warnings.filterwarnings("ignore", message=".*CUDA is not available.*")
            module = super()._build_fsdp_module(module)
        if self.scaler is not None and precision.dtype == "float16" and self._trains:
            self.scaler = LossScaler.of(precision, get_device_name())
        return module

    def _count_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if self.replay is not None:
            self.replay.moved = True

    # Passes

    @property
    def _trains(self) -> bool:
        return not self.engine_config.forward_only

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the model without its adapter as the parent does: that is the reference policy."""
        self._adapter_off = True
        try:
            with super().disable_adapter():
                yield
        finally:
            self._adapter_off = False

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """Run a mini-batch as the parent does, under the routes that travel with its samples.

        Raises:
            RoutingError: A sample's routes are missing, malformed, or in an update of other tokens, on any rank; names it. No
                forward pass has run then.
            ReplayError: A forward pass did not obey them.
        """
        if self.replay is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        reference = not self._trains or self._adapter_off
        with self.replay.batch(data, rank=self.rank, forward_only=forward_only, reference=reference) as run:
            return super().forward_backward_batch(run, loss_function, forward_only)

    def forward_step(self, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch as the parent does, recorded or replayed."""
        with nullcontext() if self.replay is None else self.replay.step():
            return super().forward_step(micro_batch, *args, **kwargs)

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        """Prepare a pass as the parent does, and begin to record or replay it."""
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.replay is not None:
            self.replay.inputs(micro_batch, output_args)
        return inputs, output_args

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a pass's outputs as the parent does, with the routes that were recorded."""
        found = super().prepare_model_outputs(output, output_args, micro_batch, *args, **kwargs)
        if self.replay is not None:
            self.replay.outputs(micro_batch, found)
        return found

    # Optimizer and schedule

    def optimizer_step(self) -> float:
        """Step as the parent does, and count what was skipped.

        Raises:
            PrecisionError: Overflows did not end.
            ConfigError: The rate was to be led by statistics that nobody gave.
        """
        if self.block is None:
            return super().optimizer_step()  # type: ignore[no-any-return]
        before = self._steps
        norm = float(super().optimizer_step())
        self._skipped += self._steps == before
        return norm

    def lr_scheduler_step(self) -> float:
        """Move the schedule on unless every step of the update was skipped, and return the rate that the update applied.

        Stock verl moves it in any case, and returns the next rate.
        """
        steps, self._steps = self._steps, 0
        self._updates += 1
        if self._rate is None and not self._scales:
            return super().lr_scheduler_step()  # type: ignore[no-any-return]
        applied = float(self.lr_scheduler.get_last_lr()[0])
        if self._rate is not None:
            applied *= self._rate.last_multiplier
        if steps:
            super().lr_scheduler_step()
        self._of_step[bool(steps)] += 1
        if self._updates % self._mode.updates == 0:
            skipped, taken = self._of_step
            self._behind, self._of_step = self._behind + (skipped if taken else 0), [0, 0]
        return applied

    @property
    def _scales(self) -> bool:
        return self.block is not None and self.scaler is not None

    # Checkpoints

    def _kept(self) -> dict[str, Any] | None:
        """Return loss scale, learning-rate control and the choice of measured passes."""
        if self.block is None or not self._trains:
            return None
        return {
            "loss_scale": self.scaler.state_dict() if self.scaler is not None else None,
            "lr": self._rate.state_dict() if self._rate is not None else None,
            **({"updates": {"behind": self._behind}} if self._behind else {}),
            "routing": self.replay.state_dict() if self.replay is not None else None,
        }

    @property
    def _resumes(self) -> bool:
        return self.block is not None and self._trains and bool(self.checkpoint_manager.should_load_extra)

    def _resume(self, state: Mapping[str, Any], folder: str) -> None:
        self._behind = int((state.get("updates") or {}).get("behind", 0))
        if self.scaler is not None:
            if state.get("loss_scale") is not None:
                self.scaler.load_state_dict(state["loss_scale"])
            elif self.rank == 0:
                warnings.warn(
                    f"{folder} holds no loss-scaler state; the loss scale starts at {self.scaler.get_scale():g}.",
                    stacklevel=3,
                )
        if self._rate is not None:
            self._rate.load_state_dict(state.get("lr"))
        if self.replay is not None and state.get("routing") is not None:
            self.replay.load_state_dict(state["routing"])

    # What the rollout gets

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights that the rollout gets, and its adapter's configuration, as the parent does.

        Raises:
            ConfigError: There is an adapter, and verl has found none of its weights to send.
        """
        weights, adapter = super().get_per_tensor_param(*args, **kwargs)
        if self._looked_at:
            with self.verdicts.checking("adapter"):
                if adapter is not None and isinstance(weights, ItemsView) and not len(weights):
                    raise ConfigError(
                        f"actor.strategy={self.engine_config.strategy!r} with an adapter: peft {installed('peft')} finds none "
                        "of its weights, and verl would send the rollout an empty one. Set "
                        "actor_rollout_ref.actor.strategy=fsdp2."
                    )
        return weights, adapter

    # What the worker asks for

    def mismatch_report(self) -> dict[str, Any]:
        """Return what this engine really does, as plain data, for the check before the first step."""
        layout = None if self.replay is None else self.replay.layout
        return {
            "engine": type(self).__name__,
            "rank": self.rank,
            "strategy": self.engine_config.strategy,
            "forward_only": not self._trains,
            "autocast_dtype": _name(self._autocast_dtype),
            "parameter_dtypes": sorted({_name(parameter.dtype) for parameter in self.module.parameters()}),
            "scaler": scaler_report(self.scaler) if self._trains else None,
            "routing": None if self.replay is None else self.replay.config.mode,
            "sampling_mask": self._masking is not None,
            "moe": None
            if layout is None
            else {
                "family": layout.family,
                "layers": list(layout.layers),
                "num_experts": layout.num_experts,
                "top_k": layout.top_k,
            },
            "lr": None if self._rate is None else self._rate.multiplier,
            "remove_padding": bool(self.use_remove_padding),
            "patches": described(RESPONSE_LOGPROBS) if self._masking is not None else [],
            "versions": {name: installed(name) for name in ("torch", "transformers", "verl")},
        }

    def mismatch_metrics(self) -> dict[str, float]:
        """Return what was measured since the last call, without prefix; all ranks must call this, after an update."""
        if self.block is None:
            return {}
        found = {
            **(scaler_metrics(self.scaler) if self._trains else {}),
            **(self._rate.metrics() if self._rate else {}),
        }
        if self._trains:
            found["skipped_steps"], self._skipped = float(self._skipped), 0
        if self.replay is not None:
            found |= self.replay.metrics()
        return found | self.mask_metrics()


def register_engine(block: MismatchConfig | None, mode: RunMode) -> type[MismatchFSDPEngine]:
    """Let verl build this engine for an FSDP actor and reference of this process, with a block, and return its class."""
    return register(MismatchFSDPEngine, block, mode, "fsdp", "fsdp2")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
