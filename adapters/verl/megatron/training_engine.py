"""verl's Megatron engine with the block: learning-rate control and its state in checkpoints.

This module imports megatron-core, so only a worker of a Megatron actor may import it. Without an `lr` section the engine steps as
its parent does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core import parallel_state
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from mismatch_ext.adapters.verl.block import RunMode
from mismatch_ext.adapters.verl.megatron.settings import registered, replayed_others
from mismatch_ext.adapters.verl.worker.lr import REQUIRED
from mismatch_ext.adapters.verl.worker.steered import SteeredMixin, register
from torch.optim import Optimizer
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.lr import LrControl
from mismatch_ext.ranks import gathered
from mismatch_ext.routing import OTHER_PASSES
from mismatch_ext.routing.replay import RouteAgreement


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the torch optimizers inside Megatron's, in its order; a part of it without parameters has none.

    Raises:
        ConfigError: One is not torch's, steps on the CPU or is precision-aware, or there are none at all.
    """
    found = []
    for part in _parts(optimizer):
        if getattr(part, "is_stub_optimizer", False):
            continue
        inner = part.optimizer
        if isinstance(inner, HybridDeviceOptimizer):
            raise _refused(inner, "it steps optimizers of its own on the CPU", "without optimizer_cpu_offload")
        if getattr(part.config, "use_precision_aware_optimizer", False):
            why = "this release has not been tried with a precision-aware optimizer, which verl also makes for float16"
            raise _refused(inner, why, "with use_precision_aware_optimizer=False, in bfloat16 or float32")
        if not isinstance(inner, Optimizer):
            raise _refused(
                inner, "it is no torch.optim.Optimizer, whose step hooks set the rate", "with optimizer=adam"
            )
        found.append(inner)
    if not found:
        raise _refused(
            optimizer, "this rank has no parameters that are trained", "in a layout in which every rank trains some"
        )
    return found


def _parts(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [part for link in chained for part in _parts(link)]


def _refused(optimizer: Any, why: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"mismatch.lr cannot lead the rate of {type(optimizer).__name__} in verl's Megatron engine: {why}. Train {allowed} "
        "(actor.optim and actor.optim.override_optimizer_config), use actor.strategy=fsdp2, or take mismatch.lr out."
    )


class MismatchMegatronEngine(SteeredMixin, MegatronEngineWithLMHead):
    """verl's Megatron engine with the block."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block = self.run_block
        self.mismatch_routes: RouteAgreement | None = None

    def initialize(self) -> None:
        """Build model, optimizer and schedule as the parent does, steer the optimizer, and have routes compared.

        Raises:
            ConfigError: The optimizer cannot be steered.
        """
        super().initialize()
        if self.block is None or self.engine_config.forward_only:
            return
        if self.block.lr is not None:
            self._rate = self._controlled()
        checks = registered()
        if self.block.routing is not None and checks is not None:
            rank = parallel_state.get_tensor_model_parallel_rank()
            twin = rank > 0 and not self.tf_config.sequence_parallel
            self.mismatch_routes = RouteAgreement(self.block.routing, int(self.engine_config.seed), twin=twin)
            checks.guard.agreement = self.mismatch_routes

    def _controlled(self) -> LrControl:
        assert self.block is not None and self.block.lr is not None
        schedule: Any = self.lr_scheduler
        return LrControl(
            self.block.lr,
            *torch_optimizers(self.optimizer),
            warmup=max(int(schedule.lr_warmup_steps), 0),
            updates=lambda: int(schedule.num_steps),
            required=REQUIRED,
        )

    def lr_scheduler_step(self) -> Any:
        """Move the schedule on, and return the rate that the update applied; stock verl returns the next one."""
        if self._rate is None:
            return super().lr_scheduler_step()
        applied = float(torch_optimizers(self.optimizer)[0].param_groups[0]["lr"]) * self._rate.last_multiplier
        super().lr_scheduler_step()
        return applied

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load as the parent does; the rate is not controlled meanwhile, as Megatron makes an optimizer's state by a step."""
        if self._rate is not None and local_path is not None and self._resumes:
            self._rate.close()
        super().load_checkpoint(local_path, *args, **kwargs)

    def _kept(self) -> dict[str, Any] | None:
        """Return learning-rate control, and which batches' routes are compared."""
        parts = {"lr": self._rate, "routing": self.mismatch_routes}
        return {name: part.state_dict() for name, part in parts.items() if part is not None} or None

    @property
    def _resumes(self) -> bool:
        ours = self._rate is not None or self.mismatch_routes is not None
        return ours and bool(self.checkpoint_mananager.should_load_optimizer)

    def _resume(self, state: Mapping[str, Any], folder: str) -> None:
        if self._rate is not None:
            self._rate = self._controlled()  # the checkpoint's schedule may have another warm-up
            self._rate.load_state_dict(state.get("lr"))
        if self.mismatch_routes is not None and state.get("routing") is not None:
            self.mismatch_routes.load_state_dict(state["routing"])

    def mismatch_metrics(self) -> dict[str, float]:
        """Return what is to be logged of the last update, without prefix; all ranks must call this."""
        found = {} if self._rate is None else self._rate.metrics()
        if self.block is not None and self.block.routing is not None:
            # A pass counts once, however many ranks share its tokens.
            found[OTHER_PASSES] = float(max(gathered(replayed_others())))
            found |= {} if self.mismatch_routes is None else self.mismatch_routes.metrics()
        return found


def register_megatron_engine(block: MismatchConfig, mode: RunMode) -> type[MismatchMegatronEngine]:
    """Let verl build this engine for a Megatron actor of this process, with a block, and return its class."""
    return register(MismatchMegatronEngine, block, mode, "megatron")
