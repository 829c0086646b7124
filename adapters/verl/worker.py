"""The Ray worker that holds actor and reference: our engine and loss in it, and what the trainer asks it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from mismatch_ext.adapters import compat
from mismatch_ext.adapters.torch.shards import named_pieces, named_shards, reshard
from mismatch_ext.adapters.transformers import read_trainer, score_tokens
from mismatch_ext.adapters.transformers.scoring import Autocast, evaluating
from mismatch_ext.adapters.verl.behavior import check_weights
from mismatch_ext.adapters.verl.block import block_of, mode_of
from mismatch_ext.adapters.verl.engine import MismatchFSDPEngine, checked, register_engine
from mismatch_ext.adapters.verl.loss import make_loss, module_of, weighs
from mismatch_ext.adapters.vllm.weights import is_comparable
from torch import Tensor, nn
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id, get_device_name
from verl.utils.ulysses import set_ulysses_sequence_parallel_group
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from mismatch_ext.checks import Checks
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.dtypes import torch_dtype
from mismatch_ext.precision.readiness import check_readiness
from mismatch_ext.versions import installed
from mismatch_ext.weights import fingerprint, sums_of

if TYPE_CHECKING:
    from mismatch_ext.adapters.verl.megatron import MismatchMegatronEngine

F = TypeVar("F", bound=Callable[..., Any])
# verl adds the members of Dispatch as it is imported.
on_all_ranks: Callable[[F], F] = register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
started_on_all_ranks: Callable[[F], F] = register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[attr-defined]


class MismatchWorker(ActorRolloutRefWorker):
    """verl's worker with the block: the objects that it has built are looked at before the first step."""

    _readiness: str | None = None

    @property
    def _actor(self) -> TrainingWorker:
        assert self.actor is not None
        return self.actor

    @property
    def _engine(self) -> MismatchFSDPEngine | MismatchMegatronEngine:
        """The actor's engine, which `init_model` has looked at."""
        return cast("MismatchFSDPEngine | MismatchMegatronEngine", self._actor.engine)

    @property
    def _fsdp(self) -> MismatchFSDPEngine:
        assert isinstance(self._actor.engine, MismatchFSDPEngine)
        return self._actor.engine

    @property
    def _megatron(self) -> bool:
        return bool(self.config.actor.strategy == "megatron")

    @property
    def _fused(self) -> bool:
        """Whether the actor's head returns log-probabilities instead of logits."""
        return not self._megatron and bool(self._fsdp.model_config.use_fused_kernels)

    def _block(self) -> MismatchConfig:
        block = block_of(self.config)
        if block is None:
            raise ConfigError(
                f"worker {os.getpid()}: actor_rollout_ref has no mismatch block, so that nothing of it is active here; leave "
                "actor_rollout_ref.rollout.custom as verl's driver set it."
            )
        return block

    @on_all_ranks
    def init_model(self, *args: Any, **kwargs: Any) -> None:
        """Build models and engines as verl does, with our engine for the actor and our loss around verl's."""
        block = self._block()
        self._checks = Checks(block.acts)
        expected: type[Any]
        if self._megatron:
            # megatron-core is imported here, where the actor needs it.
            from mismatch_ext.adapters.verl.megatron import register_megatron_engine

            expected = register_megatron_engine(block, mode_of(self.config))
        else:
            expected = register_engine(block, mode_of(self.config))
        super().init_model(*args, **kwargs)
        if "actor" not in self.role:
            return
        engine: object = self._actor.engine
        with self._checks.checking("workers"):
            if not isinstance(engine, expected):
                raise ConfigError(
                    f"worker {os.getpid()}: the actor's engine is {type(engine).__name__}, not {expected.__name__}, "
                    "although VERL_ENGINE_VENDOR asks for ours; something else has registered an engine for this vendor."
                )
        if self._checks.acts:
            config = self.loss_fn.keywords["config"]
            if weighs(block):
                check_weights(config)
            self._actor.set_loss_fn(make_loss(config, block))
        with self._checks.checking("readiness"):
            self._readiness = check_readiness(named_shards(self._engine.module), block.precision)

    @started_on_all_ranks
    async def update_weights(self, global_steps: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Send the weights as verl does; routes that come with rollouts from then on have to be of this version."""
        metrics = await super().update_weights(global_steps, *args, **kwargs)
        for part in (self.actor, self.ref):
            # With a colocated reward model verl validates after an update without a step: the servers then keep their stamp.
            replay = getattr(getattr(part, "engine", None), "replay", None)
            if replay is not None and global_steps is not None:
                replay.weight_version, replay.moved = global_steps, False
        return metrics

    @on_all_ranks
    def mismatch_report(self) -> dict[str, Any]:
        """Return what is active in this process, read back from the live objects; not collective, as one rank may raise."""
        engine, live = self._engine, {}
        if not self._megatron:
            device = torch.device(get_device_name())
            reading = read_trainer(engine.module, partial(_autocast, engine), self._fsdp.scaler, device)
            live = {"trainer": asdict(reading)}
        return {
            "rank": self.rank,
            "engine": type(engine).__name__,
            "model_type": str(engine.model_config.hf_config.model_type),
            "loss": module_of(self._actor.loss_fn),
            "versions": self._versions(),
            "readiness": self._readiness,
            **live,
            **engine.mismatch_report(),
        }

    def _versions(self) -> dict[str, str | None]:
        peers = ("verl", "torch", "transformers", *(["megatron-core"] if self._megatron else []))
        with self._checks.checking("versions"):
            compat.check(peers, self._block().features, {"verl", "megatron" if self._megatron else "fsdp"})
        return {peer: installed(peer) for peer in peers}

    @on_all_ranks
    def mismatch_look(self, token_ids: list[list[int]], dtype: str) -> dict[str, Any]:
        """Return what probe tokens `[N, T]` and this rank's shards say of the actor's present weights; all ranks must call this.

        `fingerprint` is a digest of the shards, `sums` are of the bits of tensors that an engine may hold too, after rounding to
        a dtype.
        """
        scored = score_fused if self._fused else score_tokens
        with _scoring(self._engine, token_ids) as (model, tokens, autocast):
            # The shards are read before the forward pass, which may leave some weights gathered.
            digest = fingerprint(named_shards(model))
            pieces = {name: piece for name, piece in named_pieces(model) if is_comparable(name)}
            sums = {name: sums_of(piece, torch_dtype(dtype)) for name, piece in pieces.items()}
            logprobs = scored(model, tokens, autocast).tolist()
        shapes = {name: piece.shape for name, piece in pieces.items()}
        return {"logprobs": logprobs, "fingerprint": digest, "sums": sums, "shapes": shapes}

    @on_all_ranks
    def mismatch_update_lr(self, **statistics: float) -> dict[str, float]:
        """Let a batch's statistics lead the rate of the step that learns from it."""
        return dict(self._engine.mismatch_update_lr(**statistics))

    @on_all_ranks
    def mismatch_findings(self) -> list[dict[str, Any]]:
        """Return the checks that failed in this process since the last call, in a run that goes on."""
        return [asdict(finding) for finding in self._checks.take()]

    @on_all_ranks
    def mismatch_metrics(self) -> dict[str, float]:
        """Return what the engine measured since the last call."""
        return dict(self._engine.mismatch_metrics())


def _autocast(engine: Any) -> torch.autocast:
    return torch.autocast(device_type=get_device_name(), dtype=engine._autocast_dtype)


@contextmanager
def _scoring(engine: Any, token_ids: list[list[int]]) -> Iterator[tuple[nn.Module, Tensor, Autocast]]:
    """Give the engine's model in evaluation, loaded where it is offloaded, with tokens on its device and its autocast."""
    with engine.eval_mode():  # ends with the group of ranks that was there before
        # Every rank scores all tokens by itself. verl's annotation does not allow None, although its own getter returns it.
        set_ulysses_sequence_parallel_group(None)  # type: ignore[arg-type]
        try:
            # verl's own passes put their tensors on this device too, even if the parameters are kept on the CPU.
            yield engine.module, torch.tensor(token_ids).to(get_device_id()), partial(_autocast, engine)
        finally:
            reshard(engine.module)


# Probes of an actor whose head is one of verl's fused kernels (`model.use_fused_kernels`): log-probabilities without logits


def score_fused(model: nn.Module, token_ids: Tensor, autocast: Autocast = nullcontext) -> Tensor:
    """Return log-probabilities `[N, T-1]`, float64, on the CPU, of tokens `[N, T]` by the fused head, at temperature 1."""
    with torch.no_grad(), evaluating(model), autocast():
        output = model(input_ids=token_ids, use_cache=False, return_dict=True, temperature=1.0)
    # The last place is scored against the first token.
    return checked(output.log_probs)[:, :-1].double().cpu()


# separate_async


class MismatchDetachWorker(MismatchWorker, DetachActorWorker):
    """verl's worker with the block, whose copies of the weights are real copies wherever the weights lie."""

    @property
    def copy_handler(self) -> Callable[..., Any]:
        """Return the function that copies an engine's weights to the host.

        verl 0.9.1 takes `tensor.cpu()` of FSDP2's shards, which is the tensor itself where parameters are on the host already:
        the update then changes the copy, and π_old of the next mini-batch is the present policy.
        """
        handler = super().copy_handler
        if self.config.actor.strategy != "fsdp2" or not self._checks.acts:
            return handler

        def copied(module: nn.Module) -> tuple[dict[str, tuple[Tensor, Any]], Any]:
            shards, spec = handler(module)
            if any(parameter.is_cpu for parameter in module.parameters()):
                shards = {name: (shard.clone(), of) for name, (shard, of) in shards.items()}
            return shards, spec

        return copied
