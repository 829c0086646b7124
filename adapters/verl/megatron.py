"""verl's Megatron engine with the block (experimental): the rate, and checks around verl's own replay.

verl's replay does the work of `routing`. It does not check expert ids, and lets a router without routes choose for itself. Here
every sample's routes are checked before a batch runs, and a router that does not replay is an error. Only a worker of a Megatron
actor imports this module.

Shapes: T tokens of a sample or a forward pass, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from mismatch_ext.adapters.transformers import read_trainer
from mismatch_ext.adapters.verl.block import RunMode
from mismatch_ext.adapters.verl.engine import REQUIRED, SteeredEngine, register
from mismatch_ext.adapters.verl.replay import (
    FIELD,
    altered,
    check_tokens,
    lengths,
    names,
    other_than_recorded,
    proofs_of,
    routes,
)
from mismatch_ext.adapters.verl.rollout.digests import proven, without_digests
from mismatch_ext.adapters.verl.upstream import either
from mismatch_ext.patches.verl.megatron_replay import CLOSED_TOPK
from torch import nn
from torch.optim import Optimizer
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction
from verl.utils.megatron.router_replay_utils import (
    build_r3_replay_mask,
    get_moe_num_layers_to_build,
    is_moe_layer,
    iter_model_routers,
)
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, ReplayError, RoutingError
from mismatch_ext.lr import LrControl
from mismatch_ext.patching import Patch, apply, described, verify
from mismatch_ext.ranks import WORLD, gathered, together
from mismatch_ext.routing import OTHER_PASSES, RoutingTrace

# Replay

FLAG = "enable_routing_replay"
"""Entry that verl's worker writes into a batch: whether the actor's replay is to work on it."""


class ReplayGuard:
    """Follows the replay of one batch after another in verl's Megatron engine."""

    def __init__(self) -> None:
        self._passes: WeakKeyDictionary[Any, int] | None = None  # selections per router while a batch is replayed
        self._others = 0  # passes that scored other tokens than their routes were recorded of

    @contextmanager
    def batch(self, engine: Any, data: Any, forward_only: bool) -> Iterator[Any]:
        """Check a batch's routes, give what verl is to run, and check that all routers replayed it; all ranks raise together."""
        if not tu.get_non_tensor_data(data=data, key=FLAG, default=False):
            yield data  # should verl replay it all the same, `after` refuses that
            return
        others, run = False, data
        with together(WORLD, flags=1) as flags:
            routers = self._routers(engine)
            records = engine.engine_config.router_replay.mode == "R2" and forward_only and data.get(FIELD) is None
            if not records:
                others = not check_routes(engine, data, forward_only)
                run = data if others else _plain(engine, data)
            flags.here[0] = others
        if flags.anywhere[0]:
            # Somebody asks for scores of altered samples, which are not trained on: the model routes them itself.
            self._others += 1
            yield tu.assign_non_tensor(data.exclude(FIELD), **{FLAG: False})
            return
        self._passes = WeakKeyDictionary()
        try:
            yield run
            missed = [layer for router, layer in routers if not self._passes.get(router)]
        except BaseException:
            # verl clears its queues at the end of a batch that succeeds; the next one would replay what is left in them.
            for router in [*RouterReplay.router_instances, *(router for router, _ in routers)]:
                router.clear_indices()
                router.clear_router_replay_action()
            raise
        finally:
            self._passes = None
        if missed:
            raise ReplayError(
                f"the routers of decoder layers {missed} selected experts without verl's replay, although the batch was to be "
                "replayed; look for a router that verl does not patch (moe_router_load_balancing_type='sinkhorn', a fused one)."
            )

    def take_others(self) -> int:
        """Return how many passes were over other tokens since the last call."""
        found, self._others = self._others, 0
        return found

    def _routers(self, engine: Any) -> list[tuple[Any, int]]:
        """Return this rank's routers with their decoder indices."""
        chunks = [unwrap_model(chunk) for chunk in engine.module]
        config, found = engine.tf_config, []
        for chunk in chunks:
            found += [(router, number - 1) for number, router in iter_model_routers([chunk])]
        moe_layers(config)
        stages = range(config.virtual_pipeline_model_parallel_size or 1)
        expected = sum(get_moe_num_layers_to_build(config, stage) for stage in stages)
        if len(found) != expected:
            raise ReplayError(
                f"this rank has {expected} MoE layers, but {len(found)} routers that verl can replay; was the model built before "
                "verl patched megatron-core's routers, or does it have routers of its own?"
            )
        return found

    def before(self, router: Any) -> None:
        """Refuse to let a router choose for itself where it is to replay."""
        action = router.router_replay_action
        missing = {
            RouterReplayAction.REPLAY_FORWARD: router.target_topk_idx is None,
            RouterReplayAction.REPLAY_BACKWARD: not router.replay_backward_list,
            None: self._passes is not None,
        }
        if missing.get(action, False):
            raise ReplayError(
                f"{self._name(router)}, action {None if action is None else action.value!r}: verl has no routes for this pass "
                "and would let the router choose for itself. Look for a layer that runs more often than once per forward pass "
                "or outside of the decoder (MTP), a second Megatron engine that emptied verl's list of routers, or replay "
                "without its set_router_replay_data."
            )
        if self._passes is not None:
            self._passes[router] = self._passes.get(router, 0) + 1

    def after(self, router: Any, scores: torch.Tensor, top_k: int, indices: torch.Tensor) -> None:
        """Refuse routes that are not one row per token or that nobody checked."""
        if indices.shape != (scores.shape[0], top_k):
            raise ReplayError(
                f"{self._name(router)}: the routes are {tuple(indices.shape)}, the forward pass has {scores.shape[0]} tokens of "
                f"{top_k} experts; tokens without a row would be dropped. They are of another micro-batch, or of a padded one."
            )
        if self._passes is None and router.router_replay_action in (
            RouterReplayAction.REPLAY_FORWARD,
            RouterReplayAction.REPLAY_BACKWARD,
        ):
            raise ReplayError(
                f"{self._name(router)} replays routes outside of MismatchMegatronEngine.forward_backward_batch, where they are "
                "checked. Call that method, or remove mismatch.routing."
            )

    @staticmethod
    def _name(router: Any) -> str:
        known = RouterReplay.router_instances
        at = next((number for number, found in enumerate(known) if found is router), None)
        return f"a router that is not in verl's list of {len(known)}" if at is None else f"router {at} of {len(known)}"


def moe_layers(config: Any) -> tuple[int, ...]:
    """Return the decoder indices of the MoE layers of a megatron-core TransformerConfig; raises ReplayError without any."""
    if not config.num_moe_experts:
        raise ReplayError("the Megatron model is dense: it has no routing to replay; remove mismatch.routing.")
    return tuple(index for index in range(config.num_layers) if is_moe_layer(config, index))


def check_routes(engine: Any, data: Any, forward_only: bool) -> bool:
    """Check the routes of a batch's samples, in the rows that verl's Megatron engine replays; raises RoutingError.

    Returns False for a scoring pass over other tokens than its routes were recorded of.
    """
    config, layers = engine.tf_config, moe_layers(engine.tf_config)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    tokens = lengths(data)
    recorded = engine.engine_config.router_replay.mode == "R2"
    if recorded:
        replayed, others = tokens, altered(data)
    else:  # all rows but a sample's last, and none of one without a response: verl says which
        replayed = [int(mask.sum()) for mask in build_r3_replay_mask(data["input_ids"], data["response_mask"]).unbind()]
        others = other_than_recorded(proofs_of(data), replayed)
    check_tokens(others, data, rank, forward_only)
    if others:
        return False
    found = zip(routes(data), data["input_ids"].unbind(), replayed, names(data, rank), strict=True)
    for array, ids, rows, name in found:
        _check_sample(array, ids, name, config, layers, rows, recorded=recorded)
    return True


def _plain(engine: Any, data: Any) -> Any:
    """Return a batch whose routes verl can read."""
    if engine.engine_config.router_replay.mode == "R2":
        return data
    run = data.exclude(FIELD)
    rows = [without_digests(row) for row in routes(data) if row is not None]  # checked
    run[FIELD] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return run


def _check_sample(
    array: Any, tokens: torch.Tensor, name: str, config: Any, layers: tuple[int, ...], replayed: int, *, recorded: bool
) -> None:
    """Check one sample's routes; `ingest` refuses what is not a tensor of three dimensions."""
    where, ids = f"request {name}", array
    if isinstance(array, torch.Tensor) and array.dim() == 3:
        ids = array.detach().cpu() if recorded else without_digests(array.detach().cpu())
        allowed = (len(tokens),) if recorded else (len(tokens), len(tokens) - 1)
        if len(ids) not in allowed:
            raise RoutingError(
                f"{where}: routing has {len(ids)} rows; allowed: {' or '.join(map(str, allowed))} for {len(tokens)} tokens. They "
                "were lost on the way, or are another sample's."
            )
        if ids.shape[1] not in (len(layers), config.num_layers):
            raise RoutingError(
                f"{where}: routing has {ids.shape[1]} layers; allowed: {len(layers)}, the model's MoE layers, or "
                f"{config.num_layers}, all of them. Was it recorded in another model?"
            )
        real = _recorded_rows(ids, config.moe_router_topk) if recorded else proven(array, tokens)[0]
        if real < replayed:
            raise RoutingError(
                f"{where}: routing has {real} rows, but verl replays {replayed}: the others would go to expert 0 alone. The "
                "rollout engine did not record them, or an agent loop added tokens after the last generation."
            )
        ids = ids[:replayed]
    RoutingTrace.ingest(
        ids,
        num_experts=config.num_moe_experts,
        layers=layers,
        tokens=replayed,
        version=0,
        request=name,
        top_k=config.moe_router_topk,
        last_row=True,
    )


def _recorded_rows(ids: torch.Tensor, top_k: int) -> int:
    """Return how many rows R2 recorded; with one expert per token, a row of zeros is one of them."""
    some = ids.flatten(1).any(1).nonzero()
    return len(ids) if top_k == 1 else int(some[-1]) + 1 if len(some) else 0


@cache
def guarded() -> tuple[ReplayGuard, Patch]:
    """Check what verl's routers replay in this process from now on, and return the guard and its patch."""
    guard = ReplayGuard()
    patch = CLOSED_TOPK.calling(guard)
    apply(patch)
    return guard, patch


# The rate


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the torch optimizers inside Megatron's, in its order; raises ConfigError if their rate cannot be led."""
    found = [part.optimizer for part in _parts(optimizer) if not getattr(part, "is_stub_optimizer", False)]
    steered = [one for one in found if isinstance(one, Optimizer) and not isinstance(one, HybridDeviceOptimizer)]
    # verl makes precision-aware optimizers for float16, too.
    aware = [part for part in _parts(optimizer) if getattr(part.config, "use_precision_aware_optimizer", False)]
    if found and not aware and len(steered) == len(found):
        return steered
    raise ConfigError(
        f"mismatch.lr cannot lead the rate of {[type(one).__name__ for one in found]} in verl's Megatron engine. Train with "
        "optimizer=adam, without optimizer_cpu_offload and use_precision_aware_optimizer, in a layout in which every rank trains "
        "some parameters (actor.optim), use actor.strategy=fsdp2, or take mismatch.lr out."
    )


def _parts(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [part for link in chained for part in _parts(link)]


class MismatchMegatronEngine(SteeredEngine, MegatronEngineWithLMHead):
    """verl's Megatron engine with the block."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block = self.run_block

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Build model, optimizer and schedule as the parent does, and steer the optimizer."""
        super().initialize(*args, **kwargs)
        if self.block is not None and self.block.lr is not None and not self.engine_config.forward_only:
            self._rate = self._controlled()

    def forward_backward_batch(
        self, data: Any, loss_function: Any, forward_only: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a mini-batch as the parent does; its routes are checked before any of it is reordered, split or sent."""
        if self.block is None or self.block.routing is None:
            return super().forward_backward_batch(data, loss_function, forward_only, *args, **kwargs)
        with guarded()[0].batch(self, data, forward_only) as run:
            return super().forward_backward_batch(run, loss_function, forward_only, *args, **kwargs)

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

    def lr_scheduler_step(self, *args: Any, **kwargs: Any) -> Any:
        """Move the schedule on, and return the rate that the update applied; stock verl returns the next one."""
        if self._rate is None:
            return super().lr_scheduler_step(*args, **kwargs)
        applied = float(torch_optimizers(self.optimizer)[0].param_groups[0]["lr"]) * self._rate.last_multiplier
        super().lr_scheduler_step(*args, **kwargs)
        return applied

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load as the parent does; the rate is not controlled meanwhile, as Megatron makes an optimizer's state by a step."""
        if self._rate is not None and local_path is not None and self._resumes:
            self._rate.close()
        super().load_checkpoint(local_path, *args, **kwargs)

    def _kept(self) -> dict[str, Any] | None:
        """Return learning-rate control."""
        return None if self._rate is None else {"lr": self._rate.state_dict()}

    @property
    def _resumes(self) -> bool:
        manager = either(self, "checkpoint_mananager", "checkpoint_manager")
        return self._rate is not None and bool(manager.should_load_optimizer)

    def _resume(self, state: Mapping[str, Any], folder: str) -> None:
        self._rate = self._controlled()  # the checkpoint's schedule may have another warm-up
        self._rate.load_state_dict(state.get("lr"))

    def mismatch_metrics(self) -> dict[str, float]:
        """Return what is to be logged of the last update, without prefix; all ranks must call this."""
        found = {} if self._rate is None else self._rate.metrics()
        if self.block is not None and self.block.routing is not None:
            # A pass counts once, however many ranks share its tokens.
            found[OTHER_PASSES] = float(max(gathered(guarded()[0].take_others())))
        return found

    def mismatch_report(self) -> dict[str, Any]:
        """Return what this engine runs with, as plain data, for the check before the first step."""
        reading = read_trainer(nn.ModuleList(self.module), nullcontext, None, torch.device(get_device_name()))
        optimizer = getattr(self, "optimizer", None)
        if "float16" in reading.parameter_dtypes and optimizer is not None:
            scale = {"class": type(optimizer).__name__, "enabled": True, "scale": float(optimizer.get_loss_scale())}
            reading = replace(reading, scaler=scale)
        mode = self.engine_config.router_replay.mode
        return {
            "strategy": self.engine_config.strategy,
            "trainer": asdict(reading),
            "routing": None if mode == "disabled" else mode,
            "lr": None if self._rate is None else self._rate.multiplier,
            "patches": described(guarded()[1]) if guarded.cache_info().currsize else [],
        }


def register_megatron_engine(block: MismatchConfig, mode: RunMode) -> type[MismatchMegatronEngine]:
    """Let verl build this engine for a Megatron actor of this process, with a block and its checks, and return its class."""
    if block.routing is not None:
        verify(guarded()[1])
    return register(MismatchMegatronEngine, block, mode, "megatron")
