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
from mismatch_ext.adapters.trl.async_grpo.loss import LossMixin
from mismatch_ext.adapters.trl.async_grpo.replay import TreeReplay
from mismatch_ext.adapters.trl.async_grpo.rows import CarryingCollator
from mismatch_ext.adapters.trl.async_grpo.transfer import CheckedTransfer
from mismatch_ext.adapters.trl.async_grpo.worker import ending, naming
from mismatch_ext.adapters.trl.checkpoint import CheckpointMixin
from mismatch_ext.adapters.trl.lr import LrMixin
from mismatch_ext.adapters.trl.metrics import LoggingMixin, of_agreement
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
from mismatch_ext.rollout import SamplingSettings
from mismatch_ext.verdicts import Verdicts
from mismatch_ext.weights import SyncVerdict, WeightVerifier, draw_probes

if TYPE_CHECKING:
    from trl.experimental.async_grpo import AsyncGRPOTrainer as _Host
else:
    _Host = object


class MismatchAsyncMixin(LossMixin, CheckpointMixin, LrMixin, LoggingMixin, _Host):  # type: ignore[misc]  # _routing, as in LossMixin
    """Adds the `mismatch:` block to an AsyncGRPOTrainer or to a subclass of one; put it first among the bases.

    Without a block every method passes straight on.
    """

    processing_class: Any
    # The parts that are shared with GRPO's trainers ask for these: here no engine is in this process, and no wrapper of one.
    use_vllm = False
    _kl = None
    _transfer: CheckedTransfer | None = None
    _collator: CarryingCollator | None = None

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        config: Any = kwargs.get("args") or next((a for a in args if isinstance(a, MismatchAsyncGRPOConfig)), None)
        self._block: MismatchConfig | None = (
            config.mismatch_block() if isinstance(config, MismatchAsyncGRPOConfig) else None
        )
        if self._block is None:
            super().__init__(model, *args, **kwargs)
            return
        self._verdicts = Verdicts(self._block.level, lambda: self.state.global_step)
        check_peers(type(self), self._block, use_vllm=True, server=True)
        _check_arguments(self._block, kwargs)
        self._open_log(config.output_dir)
        self._patches = []
        self._step_lengths = []
        with config.claimed(), overridden(self, _constructing=True):
            super().__init__(model, *args, **kwargs)
        self._build(config)

    def _check_sharding(self) -> None:
        check_unsharded(self._config, deepspeed=self.is_deepspeed_enabled, fsdp=self.is_fsdp_enabled)

    def _check_model(self) -> None:
        self._check_precision()
        if self._config.routing is not None:
            with RoutingRefusals(self._config.routing):
                self._routing = TreeReplay(
                    self._config.routing, self.model, seed=self.args.seed, ranks=self._ranks, step=lambda: self.state.global_step
                )  # fmt: skip

    # Once TRL has built its parts.

    def _build(self, config: Any) -> None:
        """Ask the server what it runs with, audit both sides, and come between TRL and its rollout worker and weight transfer."""
        self._sampling: SamplingSettings = sampling_settings(config, None)
        self._log.sampled_with(self._sampling)
        self._log.follow_versions()
        if self._config.correction is not None:
            self._correction = resolve(self._config.correction)
        self.add_callback(self._alarms)
        if self._config.lr is not None:
            self._lr: LrCallback | None = LrCallback(self._config.lr)
            self.add_callback(Leading(self))
            self.add_callback(self._lr)
        self._readings: dict[str, Any] = {"trainer": self._read_trainer()}
        if not self.accelerator.is_main_process:
            return
        self._remote = self._find_server(config)
        self._audit()
        if (missing := unchecked(self._remote)) is not None:
            self._warn("server", missing)
        if self._readiness is not None:
            self._warn(READINESS, self._readiness)
        self._fresh = FreshRollouts(
            self._remote,
            self._sampling,
            tokens=ENOUGH,
            length=config.max_completion_length,
        )
        self._follow(self._remote, config)
        self._log.announce()

    def _find_server(self, config: Any) -> RemoteEngine:
        """Wait for the server as TRL does, and refuse one that does not run as the block needs it."""
        client: Any = self.vllm_client  # TRL's, on the main process
        client.wait_for_server_ready()
        http = ServerHttp(client.server_url, requests.Session(), config.vllm_server_timeout)
        remote = RemoteEngine(http)
        ServerCheck(self._config)(remote, self.accelerator.device.type)
        return remote

    def _follow(self, remote: RemoteEngine, config: Any) -> None:
        """Put the gate before the rollout worker's requests, and around weight updates."""
        worker: Any = self.rollout_worker
        inner: Any = self.weight_transfer
        if not isinstance(worker, AsyncRolloutWorker) or worker._loop_cls not in (_AsyncRolloutLoop, VersionedLoop):
            name = type(worker).__name__
            raise ConfigError(
                f"rollout_worker={name} with a mismatch block: which weights have sampled a token is known of TRL's own rollout "
                "loop alone; leave it out, or remove the block."
            )
        gate = Gate(worker._mp_ctx)
        self._transfer = CheckedTransfer(
            inner,
            remote,
            gate,
            verifier=self._verifier(remote),
            step=lambda: self.state.global_step,
            on_sent=self._on_sent,
            alive=lambda: worker.check_health(config.heartbeat_stale_after_s),
            arrived=self._sample_fresh,
            over_http=remote.backend == BACKEND and isinstance(inner, WeightTransferClient),
        )
        self.weight_transfer = self._transfer
        worker._loop_cls = VersionedLoop
        worker._loop_kwargs["mismatch"] = Following(gate=gate, owner=self._transfer.stamps.owner)
        vars(worker).update(check_health=naming(worker), stop=ending(worker, gate))

    def _sample_fresh(self) -> None:
        """Measure numerics on rollouts of the weights that have just arrived."""
        prompts = [] if self._collator is None else self._collator.prompts
        # Before the first batch there are no prompts. Only one rank takes this pass, without the others' shards and checks.
        if not prompts or self.is_fsdp_enabled or (self._routing is not None and self._ranks.size > 1):
            return
        row = TreeRow()
        for sample in self._fresh.take(prompts, self.state.global_step):
            row.add(sample)
        # A collator of our own, because TRL's counts what it collates as trained on.
        collate = self._carrying(DataCollatorForRollout(self.processing_class.pad_token_id))
        inputs = collate([[row]])
        self._measure_fresh({name: value.to(self.accelerator.device) for name, value in inputs.items()})

    def _carrying(self, inner: Callable[[Any], dict[str, Any]]) -> CarryingCollator:
        ends = [*self.eos_token_ids, self.processing_class.pad_token_id]
        return CarryingCollator(inner, ends, None if self._routing is None else self._routing.layout)

    def _verifier(self, remote: RemoteEngine) -> WeightVerifier | None:
        monitor = self._config.monitor
        if monitor.weight_sync == "off":
            return None
        probes = draw_probes(plain_vocabulary(self.processing_class, self.accelerator.device), remote.longest)
        return WeightVerifier(
            self._trainer_side(),
            remote,
            monitor,
            probes,
            dtype=remote.reading().model_dtype,
            trainer_dtype=self._compute_dtype(),
            event=self._on_event,
        )

    def _read_engine(self) -> EngineReading:
        return self._remote.reading()

    def _score(self, token_ids: Tensor) -> Tensor:
        with plain_attention(self.accelerator.unwrap_model(self.model)):
            return super()._score(token_ids)

    # A training.

    def get_train_dataloader(self) -> Any:
        """Return TRL's loader, whose batches also hold what is known of their tokens."""
        if self._block is None:
            return super().get_train_dataloader()
        plain = self.accelerator.prepare

        def prepare(loader: Any) -> Any:
            loader.collate_fn = self._collator = self._carrying(loader.collate_fn)
            return plain(loader)

        with shadowed(self.accelerator, prepare=prepare):
            return super().get_train_dataloader()

    def _extra_metrics(self, split: str, of_training: bool) -> tuple[dict[str, float], dict[str, float]]:
        if split != "train":
            return {}, {}
        extra = self._log.flush(split, self.state.global_step)
        agreement = {} if self._routing is None else self._routing.take_agreement(split, self._ranks)
        logged, by_layer = of_agreement(agreement)
        return extra | logged | (self._training_metrics() if of_training else {}), by_layer

    def _further_metrics(self) -> dict[str, float]:
        return {} if self._verdict is None else {"weight_sync_gap": self._verdict.gap_mean}

    @property
    def _verdict(self) -> SyncVerdict | None:
        verifier = None if self._transfer is None else self._transfer.verifier
        return None if verifier is None else verifier.verdict

    def _ratio_bias(self) -> str | None:
        return self._sampling.ratio_bias()

    # What a checkpoint holds.

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        if self._transfer is not None and self._transfer.verifier is not None:
            state["weight_sync"] = self._transfer.verifier.state_dict()
        return state

    def _go_on_from(self, state: dict[str, Any]) -> None:
        super()._go_on_from(state)
        if self._transfer is not None and self._transfer.verifier is not None and state.get("weight_sync") is not None:
            said = self._transfer.verifier.load_state_dict(state["weight_sync"])
            if said is not None:
                self._told(self._resumed_step, "settings_changed", said)


class MismatchAsyncGRPOTrainer(MismatchAsyncMixin, AsyncGRPOTrainer):  # type: ignore[misc]  # as in MismatchAsyncMixin
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
