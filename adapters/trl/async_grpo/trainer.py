"""AsyncGRPOTrainer with the `mismatch:` block.

The server samples while the trainer trains, so that most tokens are of older weights than those that learn from them. The
rollout worker notes the version of each token's weights (`loop.py`, `gate.py`), the collator puts it beside the tokens
(`rows.py`), and the loss tells drift from numerics (`loss.py`). Weight updates are named and verified (`transfer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import requests
from mismatch_ext.adapters.transformers.lr import LrCallback
from mismatch_ext.adapters.transformers.vocabulary import plain_vocabulary
from mismatch_ext.adapters.trl.async_grpo.config import MismatchAsyncGRPOConfig, check_unsharded
from mismatch_ext.adapters.trl.async_grpo.fresh import FreshRollouts
from mismatch_ext.adapters.trl.async_grpo.gate import Gate
from mismatch_ext.adapters.trl.async_grpo.leading import Leading
from mismatch_ext.adapters.trl.async_grpo.loop import Following, VersionedLoop
from mismatch_ext.adapters.trl.async_grpo.loss import LossRun
from mismatch_ext.adapters.trl.async_grpo.replay import TreeReplay
from mismatch_ext.adapters.trl.async_grpo.rows import CarryingCollator
from mismatch_ext.adapters.trl.async_grpo.transfer import CheckedTransfer
from mismatch_ext.adapters.trl.async_grpo.worker import ending, naming
from mismatch_ext.adapters.trl.host import of_agreement
from mismatch_ext.adapters.trl.overridden import overridden, shadowed
from mismatch_ext.adapters.trl.readings import sampling_settings
from mismatch_ext.adapters.trl.refusals import RoutingRefusals, check_peers
from mismatch_ext.adapters.vllm.http import ServerHttp
from mismatch_ext.adapters.vllm.remote import RemoteEngine
from mismatch_ext.adapters.vllm.server.plugin import BACKEND
from mismatch_ext.adapters.vllm.server_checks import ServerCheck, unchecked
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
from trl.experimental.async_grpo.packing import TreeRow
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

from mismatch_ext.config import MismatchConfig
from mismatch_ext.drift import ENOUGH
from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.precision.readiness import EVENT as READINESS
from mismatch_ext.presets import resolve
from mismatch_ext.weights import SyncVerdict, WeightVerifier, draw_probes

if TYPE_CHECKING:
    from trl.experimental.async_grpo import AsyncGRPOTrainer as _Host
else:
    _Host = object


class AsyncRun(LossRun):
    """The block's side of an AsyncGRPOTrainer, as `trainer.mm`."""

    remote: RemoteEngine
    transfer: CheckedTransfer | None = None
    collator: CarryingCollator | None = None

    def check_sharding(self) -> None:
        """Refuse sections that do not work with sharded parameters."""
        trainer = self.trainer
        check_unsharded(self.block, deepspeed=trainer.is_deepspeed_enabled, fsdp=trainer.is_fsdp_enabled)

    def check_model(self) -> None:
        """Refuse a model that the block does not fit."""
        self.check_precision()
        if self.block.routing is not None:
            with RoutingRefusals(self.block.routing):
                self.routing = TreeReplay(
                    self.block.routing, self.trainer.model, seed=self.trainer.args.seed, ranks=self.ranks,
                    step=lambda: self.step,
                )  # fmt: skip

    # Once TRL has built its parts.

    def begin(self, config: Any) -> None:
        """Ask the server what it runs with, audit both sides, and come between TRL and its rollout worker and weight transfer."""
        self.sampling = sampling_settings(config, None)
        self.log.sampled_with(self.sampling)
        self.log.follow_versions()
        if self.block.correction is not None:
            self.correction = resolve(self.block.correction)
        self.trainer.add_callback(self.alarms)
        if self.block.lr is not None:
            self.lr = LrCallback(self.block.lr)
            self.trainer.add_callback(Leading(self))
            self.trainer.add_callback(self.lr)
        self.readings = {"trainer": self.read_trainer()}
        if not self.trainer.accelerator.is_main_process:
            return
        self.remote = self._find_server(config)
        self.audit()
        if (missing := unchecked(self.remote)) is not None:
            self.warn("server", missing)
        if self.readiness is not None:
            self.warn(READINESS, self.readiness)
        self.fresh = FreshRollouts(
            self.remote,
            self.sampling,
            tokens=ENOUGH,
            length=config.max_completion_length,
        )
        self._follow(self.remote, config)
        self.log.announce()

    def _find_server(self, config: Any) -> RemoteEngine:
        """Wait for the server as TRL does, and refuse one that does not run as the block needs it."""
        client: Any = self.trainer.vllm_client  # TRL's, on the main process
        client.wait_for_server_ready()
        http = ServerHttp(client.server_url, requests.Session(), config.vllm_server_timeout)
        remote = RemoteEngine(http)
        ServerCheck(self.block)(remote, self.trainer.accelerator.device.type)
        return remote

    def _follow(self, remote: RemoteEngine, config: Any) -> None:
        """Put the gate before the rollout worker's requests, and around weight updates."""
        worker: Any = self.trainer.rollout_worker
        inner: Any = self.trainer.weight_transfer
        if not isinstance(worker, AsyncRolloutWorker) or worker._loop_cls not in (_AsyncRolloutLoop, VersionedLoop):
            name = type(worker).__name__
            raise ConfigError(
                f"rollout_worker={name} with a mismatch block: which weights have sampled a token is known of TRL's own rollout "
                "loop alone; leave it out, or remove the block."
            )
        gate = Gate(worker._mp_ctx)
        self.transfer = CheckedTransfer(
            inner,
            remote,
            gate,
            verifier=self._verifier(remote),
            step=lambda: self.step,
            on_sent=self.sent,
            alive=lambda: worker.check_health(config.heartbeat_stale_after_s),
            arrived=self._sample_fresh,
            over_http=remote.backend == BACKEND and isinstance(inner, WeightTransferClient),
        )
        self.trainer.weight_transfer = self.transfer
        worker._loop_cls = VersionedLoop
        worker._loop_kwargs["mismatch"] = Following(gate=gate, owner=self.transfer.stamps.owner)
        vars(worker).update(check_health=naming(worker), stop=ending(worker, gate))

    def _sample_fresh(self) -> None:
        """Measure numerics on rollouts of the weights that have just arrived."""
        prompts = [] if self.collator is None else self.collator.prompts
        # Before the first batch there are no prompts. Only one rank takes this pass, without the others' shards and checks.
        if not prompts or self.trainer.is_fsdp_enabled or (self.routing is not None and self.ranks.size > 1):
            return
        row = TreeRow()
        for sample in self.fresh.take(prompts, self.step):
            row.add(sample)
        # A collator of our own, because TRL's counts what it collates as trained on.
        collate = self.carrying(DataCollatorForRollout(self.trainer.processing_class.pad_token_id))
        inputs = collate([[row]])
        self._measure_fresh({name: value.to(self.trainer.accelerator.device) for name, value in inputs.items()})

    def carrying(self, inner: Callable[[Any], dict[str, Any]]) -> CarryingCollator:
        ends = [*self.trainer.eos_token_ids, self.trainer.processing_class.pad_token_id]
        return CarryingCollator(inner, ends, None if self.routing is None else self.routing.layout)

    def _verifier(self, remote: RemoteEngine) -> WeightVerifier | None:
        monitor = self.block.monitor
        if monitor.weight_sync == "off":
            return None
        probes = draw_probes(
            plain_vocabulary(self.trainer.processing_class, self.trainer.accelerator.device), remote.longest
        )
        return WeightVerifier(
            self.trainer_side(),
            remote,
            monitor,
            probes,
            dtype=remote.reading().model_dtype,
            trainer_dtype=self.compute_dtype,
            event=self.of_update,
        )

    def read_engine(self) -> EngineReading:
        return self.remote.reading()

    def score_probes(self, token_ids: Tensor) -> Tensor:
        with plain_attention(self.trainer.accelerator.unwrap_model(self.trainer.model)):
            return super().score_probes(token_ids)

    def extra_metrics(self, split: str, of_training: bool) -> tuple[dict[str, float], dict[str, float]]:
        if split != "train":
            return {}, {}
        extra = self.log.flush(split, self.step)
        agreement = {} if self.routing is None else self.routing.take_agreement(split, self.ranks)
        logged, by_layer = of_agreement(agreement)
        return extra | logged | (self.training_metrics() if of_training else {}), by_layer

    def further_metrics(self) -> dict[str, float]:
        return {} if self.verdict is None else {"weight_sync_gap": self.verdict.gap_mean}

    @property
    def verdict(self) -> SyncVerdict | None:
        verifier = None if self.transfer is None else self.transfer.verifier
        return None if verifier is None else verifier.verdict

    def ratio_bias(self) -> str | None:
        return self.sampling.ratio_bias()

    # What a checkpoint holds.

    def state(self) -> dict[str, Any]:
        state = super().state()
        if self.transfer is not None and self.transfer.verifier is not None:
            state["weight_sync"] = self.transfer.verifier.state_dict()
        return state

    def go_on_from(self, state: dict[str, Any]) -> None:
        super().go_on_from(state)
        if self.transfer is not None and self.transfer.verifier is not None and state.get("weight_sync") is not None:
            said = self.transfer.verifier.load_state_dict(state["weight_sync"])
            if said is not None:
                self.told(self._resumed_step, "settings_changed", said)


class MismatchAsyncMixin(_Host):
    """Adds the `mismatch:` block to an AsyncGRPOTrainer or to a subclass of one; put it first among the bases.

    Without a block every method passes straight on.
    """

    mm: AsyncRun | None = None

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        config: Any = kwargs.get("args") or next((a for a in args if isinstance(a, MismatchAsyncGRPOConfig)), None)
        block = config.mismatch_block() if isinstance(config, MismatchAsyncGRPOConfig) else None
        if block is None:
            super().__init__(model, *args, **kwargs)
            return
        self.mm = mm = AsyncRun(self, block, config.output_dir)
        mm.verdicts.at(lambda: mm.step)
        check_peers(type(self), block, use_vllm=True, server=True)
        _check_arguments(block, kwargs)
        with config.claimed(), overridden(mm, constructing=True):
            super().__init__(model, *args, **kwargs)
        mm.begin(config)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, with a loss scaler that is on wherever float16 was asked for, and check the model."""
        super().create_accelerator_and_postprocess()
        if self.mm is not None:
            self.mm.accelerator_created()

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; the metrics file says how it ended."""
        if self.mm is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        with self.mm.training(resume_from_checkpoint):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return TRL's loader, whose batches also hold what is known of their tokens."""
        mm = self.mm
        if mm is None:
            return super().get_train_dataloader()
        plain = self.accelerator.prepare

        def prepare(loader: Any) -> Any:
            loader.collate_fn = mm.collator = mm.carrying(loader.collate_fn)
            return plain(loader)

        with shadowed(self.accelerator, prepare=prepare):
            return super().get_train_dataloader()

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as TRL does, from a forward pass under recorded routes; the correction weights each token."""
        return self.plain_loss(*args, **kwargs) if self.mm is None else self.mm.loss(self.plain_loss, *args, **kwargs)

    def plain_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of the class after this one."""
        return super().compute_loss(*args, **kwargs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.mm is not None:
            self.mm.grad_norm(norm)
        return norm

    def _get_learning_rate(self) -> float:
        scheduled = super()._get_learning_rate()
        return scheduled if self.mm is None or self.mm.lr is None else scheduled * self.mm.lr.applied

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with the mismatch metrics added, and write the same numbers to the run directory."""
        if self.mm is None:
            super().log(logs, start_time)
        else:
            self.mm.logged(super().log, logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.mm is not None:
            self.mm.save(trial)
        super()._save_checkpoint(model, trial)

    def _load_scaler(self, checkpoint: str | None) -> None:
        super()._load_scaler(checkpoint)
        if self.mm is not None and checkpoint is not None:
            with self.mm.verdicts.checking("checkpoint"):
                self.mm.load(checkpoint)


class MismatchAsyncGRPOTrainer(MismatchAsyncMixin, AsyncGRPOTrainer):
    """Drop-in `AsyncGRPOTrainer` that takes a `MismatchAsyncGRPOConfig`."""


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Let a model use plain attention for the time of a block, because TRL's attention needs the paths of a packed tree."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _check_arguments(block: MismatchConfig, given: dict[str, Any]) -> None:
    """Refuse what the block does not cover.

    Raises:
        ConfigError: Names the argument, and what is allowed.
    """
    if given.get("peft_config") is not None:
        raise ConfigError(
            "a mismatch block with AsyncGRPO and peft_config: what reaches the server of an adapter is not verified; train all "
            "weights, or remove the block."
        )
    for key in ("tools", "environment_factory"):
        if block.routing is not None and given.get(key):
            raise ConfigError(
                f"mismatch.routing with {key}: rollouts are stitched from several generations, whose routes are not joined; "
                "remove mismatch.routing."
            )
