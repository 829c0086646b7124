"""verl's FSDP engine with the block, and what Megatron's has in common with it: rate, state in checkpoints, verl's registry.

verl's registry looks engines up by device and vendor first, so that `VERL_ENGINE_VENDOR=mismatch` takes this one and
`actor.strategy` stays as it is. Without a block the engine does what its parent does.
"""

from __future__ import annotations

import math
import os
import warnings
from abc import ABCMeta, abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from mismatch_ext.adapters.verl.block import RunMode
from mismatch_ext.adapters.verl.loss import check_weighed, weighs
from mismatch_ext.adapters.verl.replay import EngineReplay
from mismatch_ext.adapters.verl.upstream import either
from verl.utils import torch_functional
from verl.utils.device import get_device_name
from verl.utils.fs import copy_to_local
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from mismatch_ext import checkpoint
from mismatch_ext.checkpoint import STATE_FILE
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.lr import LrControl, warn_of_short_training
from mismatch_ext.precision.scaler import LossScaler
from mismatch_ext.ranks import WORLD, gathered, together
from mismatch_ext.versions import installed

if TYPE_CHECKING:
    from mismatch_ext.adapters.verl.sampling_mask import EngineMasks
    from verl.workers.engine import BaseEngine as _Host
else:
    _Host = object

VENDOR = "mismatch"
E = TypeVar("E", bound="SteeredEngine")


class SteeredEngine(_Host, metaclass=ABCMeta):
    """An engine of verl's whose rate the driver leads, and which is resumed with what this package keeps of it."""

    run_block: ClassVar[MismatchConfig | None] = None
    run_mode: ClassVar[RunMode] = RunMode()
    _rate: LrControl | None = None

    @abstractmethod
    def _kept(self) -> dict[str, Any] | None:
        """Return the state that lies beside verl's in a checkpoint; None where this engine has none."""

    @property
    @abstractmethod
    def _resumes(self) -> bool:
        """Whether the state that `_kept` returned is to be loaded together with verl's."""

    @abstractmethod
    def _resume(self, state: Mapping[str, Any], folder: str) -> None:
        """Go on from the state that `_kept` returned; it is empty if the checkpoint has none."""

    def forward_backward_batch(
        self, data: Any, loss_function: Any, forward_only: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a mini-batch as the parent does; raises RecordError if the block corrects by weights, and an update has none."""
        if not forward_only and self.run_block is not None and weighs(self.run_block):
            with together(WORLD):
                check_weighed(data)
        return super().forward_backward_batch(data, loss_function, forward_only, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step as the parent does, at the rate that the driver's statistics lead; raises ConfigError if nobody gave any."""
        if self._rate is None:
            return super().optimizer_step(*args, **kwargs)
        with self._rate.applied():
            norm = super().optimizer_step(*args, **kwargs)
        self._rate.note_grad_norm(float(norm))
        return norm

    def mismatch_update_lr(self, **statistics: float | None) -> dict[str, float]:
        """Take the driver's statistics before an update, the same on all ranks, and return what to log of the rate.

        One of verl's updates is a step, however many mini-batches and epochs it has, and `period` and warm-up count updates too.
        In `separate_async`, the local updates between two weight updates are one step, which its first batch leads. Raises
        RecordError if the trigger's statistic is missing or not finite.
        """
        if self._rate is None:
            return {}
        self._rate.collect(statistics)
        return self._rate.lead()

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save as the parent does, and beside it what this package keeps of the engine."""
        if local_path is not None and (state := self._kept()) is not None:
            with together(WORLD):
                if WORLD.rank == 0:  # first: a checkpoint that verl has finished must not lack our part of it
                    checkpoint.write_state(Path(local_path) / STATE_FILE, state)
        super().save_checkpoint(local_path, *args, **kwargs)

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load as the parent does, and what this package kept of the engine where its schedule is loaded too."""
        super().load_checkpoint(local_path, *args, **kwargs)
        if local_path is not None and self._resumes:
            self._resume(read_state(local_path) or {}, local_path)


def read_state(folder: str) -> dict[str, Any] | None:
    """Return what rank 0 finds of ours in a checkpoint, on all ranks, which must all call this; None where there is nothing."""
    state = None
    with together(WORLD):
        if WORLD.rank == 0:
            path = str(Path(folder) / STATE_FILE) if "://" not in folder else f"{folder}/{STATE_FILE}"
            state = checkpoint.read_state(Path(copy_to_local(path)))
    return gathered(state)[0]  # type: ignore[no-any-return]


def register(engine: type[E], block: MismatchConfig | None, mode: RunMode, *backends: str) -> type[E]:
    """Let verl build an engine of this class with a block in this process, for some of its strategies; return what it builds.

    Another run's engine of the same kind is replaced; without a block it does what its parent does.
    """
    of_run = type(engine.__name__, (engine,), {"run_block": block, "run_mode": mode, "__module__": engine.__module__})
    for backend in backends:
        entries = EngineRegistry._engines.setdefault("language_model", {}).setdefault(backend, {})
        for device in {"cuda", get_device_name(), os.environ.get("VERL_ENGINE_DEVICE") or "cuda"}:
            entries[device, VENDOR] = of_run
    os.environ["VERL_ENGINE_VENDOR"] = VENDOR
    return of_run


class MismatchFSDPEngine(SteeredEngine, FSDPEngineWithLMHead):
    """verl's FSDP engine with the block: FSDP1 (`strategy: fsdp`) or FSDP2."""

    scaler: Any
    replay: EngineReplay | None = None
    masks: EngineMasks | None = None
    _adapter_off = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = self.run_block
        # With a block that does not act the engine computes as verl's own does.
        self.block = given if given is not None and given.acts else None
        self._steps = self._skipped = self._updates = 0
        self._of_step = [0, 0]  # updates of the present step that were skipped, and that were not
        self._behind = 0  # skipped updates of steps that had others, too: the schedule is behind by as many
        self._mode = self.run_mode

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Build model, optimizer and schedule as the parent does, and put the block on them."""
        super().initialize(*args, **kwargs)
        block = self.block
        if block is None:
            return
        if block.routing is not None and (self._trains or block.routing.reference):
            self.replay = EngineReplay(
                block.routing, self.module, int(self.engine_config.seed), int(self.ulysses_sequence_parallel_size)
            )
            self.replay.takes_older = self._mode.asynchronous
        if block.sampling_mask is not None:
            from mismatch_ext.adapters.verl.sampling_mask import EngineMasks

            self.masks = EngineMasks(int(self.model_config.hf_config.get_text_config().vocab_size))
        if not self._trains:
            return
        self.optimizer.register_step_post_hook(self._count_step)
        if block.lr is not None:
            optim = self.optimizer_config
            warmup = int(optim.lr_warmup_steps or 0)
            if warmup <= 0:
                warmup = int(optim.lr_warmup_steps_ratio * optim.total_training_steps)
            self._rate = LrControl(
                block.lr,
                self.optimizer,
                warmup=math.ceil(warmup / self._mode.updates),
                # Local updates between two weight updates are one step of the rule, even if some of them were skipped.
                updates=lambda: (int(self.lr_scheduler.last_epoch) + self._behind) // self._mode.updates,
                required=REQUIRED,
            )
            warn_of_short_training(block.lr, int(optim.total_training_steps))

    def _build_fsdp_module(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Build as the parent does, with a loss scaler for the engine's real device."""
        precision = None if self.block is None else self.block.precision
        if precision is None:
            return super()._build_fsdp_module(module, *args, **kwargs)
        with warnings.catch_warnings():
            # verl's scaler warns so when it disables itself without CUDA; it is replaced below.
            warnings.filterwarnings("ignore", message=".*CUDA is not available.*")
            module = super()._build_fsdp_module(module, *args, **kwargs)
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

    def forward_backward_batch(
        self, data: Any, loss_function: Any, forward_only: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a mini-batch as the parent does, under the routes and over the masks that travel with its samples.

        Raises RoutingError or RecordError before any pass if a sample's are missing, malformed, or in an update of other tokens,
        on any rank; ReplayError if a pass did not obey them.
        """
        masks: AbstractContextManager[Any] = nullcontext(data)
        replay = self.replay
        if self.masks is not None:
            masks = self.masks.batch(data, rank=self.rank, forward_only=forward_only)
        with masks as run:
            if replay is None:
                return super().forward_backward_batch(run, loss_function, forward_only, *args, **kwargs)
            reference = not self._trains or self._adapter_off
            with replay.batch(run, rank=self.rank, forward_only=forward_only, reference=reference) as run:
                return super().forward_backward_batch(run, loss_function, forward_only, *args, **kwargs)

    def forward_step(self, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch as the parent does, recorded or replayed."""
        with nullcontext() if self.replay is None else self.replay.step():
            return super().forward_step(micro_batch, *args, **kwargs)

    def prepare_model_inputs(self, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a pass as the parent does, and begin to record or replay it."""
        inputs, output_args = super().prepare_model_inputs(micro_batch, *args, **kwargs)
        if self.replay is not None:
            self.replay.inputs(micro_batch, output_args)
        return inputs, output_args

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a pass's outputs as the parent does, in float32, over the masks, and with the routes that were recorded."""
        if self.block is not None and self.block.precision is not None:
            _widen(output)
        found = super().prepare_model_outputs(output, output_args, micro_batch, *args, **kwargs)
        if self.masks is not None:
            self.masks.outputs(output, output_args, micro_batch, found)
        if self.replay is not None:
            self.replay.outputs(micro_batch, found)
        return found

    # Optimizer and schedule

    def optimizer_step(self, *args: Any, **kwargs: Any) -> float:
        """Step as the parent does, and count what was skipped; raises PrecisionError if overflows do not end."""
        if self.block is None:
            return super().optimizer_step(*args, **kwargs)  # type: ignore[no-any-return]
        before = self._steps
        norm = float(super().optimizer_step(*args, **kwargs))
        self._skipped += self._steps == before
        return norm

    def lr_scheduler_step(self, *args: Any, **kwargs: Any) -> float:
        """Move the schedule on unless every step of the update was skipped; return the applied rate, where verl's is the next."""
        steps, self._steps = self._steps, 0
        self._updates += 1
        if self._rate is None and (self.block is None or self.scaler is None):
            return super().lr_scheduler_step(*args, **kwargs)  # type: ignore[no-any-return]
        applied = float(self.lr_scheduler.get_last_lr()[0])
        if self._rate is not None:
            applied *= self._rate.last_multiplier
        if steps:
            super().lr_scheduler_step(*args, **kwargs)
        self._of_step[bool(steps)] += 1
        if self._updates % self._mode.updates == 0:
            skipped, taken = self._of_step
            self._behind, self._of_step = self._behind + (skipped if taken else 0), [0, 0]
        return applied

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
        """Return the weights that the rollout gets, and its adapter, as the parent does; refuse an adapter without weights.

        If the block acts, a tied output head is left out: vLLM takes the embeddings for it, and refuses a bucket that has the
        head alone.
        """
        weights, adapter = super().get_per_tensor_param(*args, **kwargs)
        if self.block is None:
            return weights, adapter
        if not isinstance(weights, ItemsView):
            return _without_tied_copies(weights, self.module), adapter
        if adapter is not None and not len(weights):
            raise ConfigError(
                f"actor.strategy={self.engine_config.strategy!r} with an adapter: peft {installed('peft')} finds none of its "
                "weights, and verl would send the rollout an empty one. Set actor_rollout_ref.actor.strategy=fsdp2."
            )
        return weights, adapter

    # What the worker asks for

    def mismatch_report(self) -> dict[str, Any]:
        """Return what this engine really does, as plain data, for the check before the first step."""
        moe = None
        if self.replay is not None:
            layout = self.replay.layout
            moe = {name: getattr(layout, name) for name in ("family", "num_experts", "top_k")}
            moe["layers"] = list(layout.layers)
        return {
            "strategy": self.engine_config.strategy,
            "routing": None if self.replay is None else self.replay.config.mode,
            "sampling_mask": self.masks is not None,
            "moe": moe,
            "lr": None if self._rate is None else self._rate.multiplier,
        }

    def mismatch_metrics(self) -> dict[str, float]:
        """Return what was measured since the last call, without prefix; all ranks must call this, after an update."""
        if self.block is None:
            return {}
        metrics: dict[str, float] = {}
        if self._trains:
            if isinstance(self.scaler, LossScaler):
                metrics |= self.scaler.metrics()
            elif self.scaler is not None:
                metrics["loss_scale"] = float(self.scaler.get_scale())
            metrics["skipped_steps"], self._skipped = float(self._skipped), 0
        for part in (self._rate, self.replay, self.masks):
            metrics |= {} if part is None else part.metrics()
        return metrics


REQUIRED = "use verl's trainer with this package's trainer_mode"
"""Advice where the driver gave no statistics before an update; the update is refused."""


def register_engine(block: MismatchConfig | None, mode: RunMode) -> type[MismatchFSDPEngine]:
    """Let verl build this engine for an FSDP actor and reference of this process, with a block, and return its class."""
    return register(MismatchFSDPEngine, block, mode, "fsdp", "fsdp2")


def _without_tied_copies(weights: Iterable[tuple[str, Any]], module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield weights by name, without those that come a second time under another name."""
    model = getattr(module, "_fsdp_wrapped_module", module)
    source_of = getattr(model, "all_tied_weights_keys", {})
    sent = set[str]()
    for name, values in weights:
        if source_of.get(name) in sent:
            continue
        sent.add(name)
        yield name, values


def _widen(output: Any) -> None:
    """Give verl logits in float32 where it has no kernel for the cross-entropy: its own sum rounds to half precision."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor) and not _has_kernel():
        output.logits = logits.float()
    if isinstance(logprobs := getattr(output, "log_probs", None), torch.Tensor):
        checked(logprobs)


def _has_kernel() -> bool:
    """Return whether verl computes log-probabilities by a kernel of flash-attention's or of Ascend's, as it chooses itself."""
    without_flash = os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") == "1"
    has_flash = either(
        torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", "FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE"
    )
    if has_flash and not without_flash:
        return True
    return bool(torch_functional.NPU_CROSS_ENTROPY_LOSS_AVAILABLE)


def checked(logprobs: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of one of verl's fused heads; raises ConfigError if they are in half precision."""
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            "actor_rollout_ref.model.fused_kernel_options.impl_backend: the fused head returns log-probabilities in "
            f"{_name(logprobs.dtype)}; allowed: float32, in which the rollout has its own. Use impl_backend='torch', or "
            "use_fused_kernels=False."
        )
    return logprobs


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
