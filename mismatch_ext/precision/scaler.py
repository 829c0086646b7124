"""Dynamic loss scaling that stays on if it was asked for: also on a CPU, on every rank and with every optimizer."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from mismatch_ext.errors import PrecisionError

if TYPE_CHECKING:
    from mismatch_ext.config import PrecisionConfig

STATE_KEY = "mismatch_ext"
_COUNTERS = ("steps", "overflow_steps", "overflow_streak", "longest_overflow_streak")
GROWTH_FACTOR, BACKOFF_FACTOR = 2.0, 0.5  # torch.amp.GradScaler's own, which arXiv 2510.26788's code keeps
MIN_SCALE = 1.0  # a smaller one no longer scales up
MAX_OVERFLOW_STREAK = 20  # a choice: from 2^16 the scale falls below MIN_SCALE after 17 in a row


class LossScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that raises an error where torch's stays silent: float16 needs scaling throughout (arXiv
    2510.26788).

    It cannot be created disabled, unlike torch's `ShardedGradScaler`, which disables itself on a CPU. Ranks agree on an
    overflow before any of them steps. On an overflow `optimizer.step` is never called, not even a fused optimizer's. Overflows
    are counted, and too long a streak of them is an error. Its state contains the counters; torch's scaler can load it, and it
    torch's.

    Args:
        device: Device type that gradients live on, for example "cuda" or "cpu".
        init_scale: First loss scale, at least 1; a power of two keeps scaling exact.
        growth_interval: Steps in a row without overflow before the scale doubles (400 in arXiv 2510.26788's code).

    Raises:
        PrecisionError: `init_scale` is below 1, or torch would disable the scaler on this device.
    """

    def __init__(
        self,
        device: str | torch.device,
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 400,
    ) -> None:
        kind = torch.device(device).type
        if not MIN_SCALE <= init_scale < math.inf or growth_interval < 1:
            raise PrecisionError(
                f"init_scale={init_scale!r}, growth_interval={growth_interval!r} is not allowed for the loss scaler; allowed: a "
                f"finite number >= {MIN_SCALE:g}, an integer >= 1."
            )
        with warnings.catch_warnings():
            # torch only warns when it disables itself; the error below replaces that warning.
            warnings.simplefilter("ignore")
            super().__init__(kind, init_scale, GROWTH_FACTOR, BACKOFF_FACTOR, growth_interval, enabled=True)
        if not self.is_enabled():
            raise PrecisionError(
                f"torch disables the loss scaler for device {kind!r}, which is not available to this process; float16 training "
                "would run unscaled. Name the device that the gradients are on, or train in bfloat16 or float32."
            )
        self.init_scale = init_scale
        self.steps = 0
        self.overflow_steps = 0
        self.overflow_streak = 0
        self.longest_overflow_streak = 0

    @classmethod
    def of(cls, precision: PrecisionConfig, device: str | torch.device) -> LossScaler:
        """Return the scaler that a block's `precision` asks for."""
        return cls(device, init_scale=precision.init_scale, growth_interval=precision.growth_interval)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, once per step, and tell all ranks if one of them has an overflow."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for gradient in gradients:
            if gradient.dtype == torch.float16:
                raise PrecisionError(
                    f"a gradient of shape {tuple(gradient.shape)} is float16, so the master weights are; unscaling would flush "
                    "its small values to zero. Load the model in float32 and compute under float16 autocast."
                )
        if not gradients and not self._shared():
            raise PrecisionError(
                f"no parameter of {type(optimizer).__name__} has a gradient; call scaler.scale(loss).backward() before the step."
            )
        super().unscale_(optimizer)
        self._agree(self._found_inf_per_device(optimizer))

    def _shared(self) -> bool:
        """Tell whether several ranks step together."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def _agree(self, flags: dict[Any, Any]) -> None:
        """Set the overflow flag on every rank if it is set on one."""
        if not self._shared():
            return
        # Every rank makes one collective call per step, even if it holds no shard with a gradient. The flag is
        # on the accelerator even if gradients are offloaded to the CPU, because NCCL cannot reduce there.
        device = torch.device(self._device)
        flag = torch.zeros((), dtype=torch.float32, device=device)
        for value in flags.values():
            flag = torch.maximum(flag, value.to(device))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        for value in flags.values():
            value.copy_(flag)
        if not flags:
            flags[device] = flag

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that was not done yet, then call `optimizer.step` unless the gradients overflowed.

        On an overflow torch still calls the step of a fused optimizer, whose kernel skips the update. accelerate takes that
        call for a real step, and advances the learning-rate schedule. The test here costs one host synchronization.
        """
        if "closure" in kwargs or any(map(callable, args)):
            raise PrecisionError(
                "the loss scaler cannot step with a closure: gradients that it recomputes would not be unscaled."
            )
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        overflow = _overflowed(state)
        result: float | None = None if overflow else optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale after all optimizers have stepped, and count overflows; raises PrecisionError if they do not end."""
        overflow = any(_overflowed(state) for state in self._per_optimizer_states.values())
        super().update(new_scale)
        self.steps += 1
        self.overflow_steps += overflow
        if overflow and self.get_backoff_factor() == 1:
            return  # the scale is held, because it has no part in this overflow
        self.overflow_streak = self.overflow_streak + 1 if overflow else 0
        self.longest_overflow_streak = max(self.longest_overflow_streak, self.overflow_streak)
        if overflow:
            self._refuse_endless_overflow()

    def _refuse_endless_overflow(self) -> None:
        scale = self.get_scale()
        if self.overflow_streak > MAX_OVERFLOW_STREAK:
            reason = f"more than {MAX_OVERFLOW_STREAK}"
        elif scale < MIN_SCALE:
            reason = f"and the scale is below {MIN_SCALE:g}"
        else:
            return
        raise PrecisionError(
            f"gradients overflowed in {self.overflow_streak} steps in a row, {reason}: loss scale {scale:g} "
            f"after {self.steps} steps, {self.overflow_steps} of them skipped. A smaller scale does not "
            "help, so the forward pass or the loss itself is not finite. Check the loss for NaN, run the "
            "readiness scan on prompts of this step for activations above 65504, lower the learning rate, "
            "or use bfloat16 or float32."
        )

    def metrics(self) -> dict[str, float]:
        """Return the scale and the overflow counts under the names that the metrics stream uses."""
        return {
            "loss_scale": self.get_scale(),
            "overflow_steps": float(self.overflow_steps),
            "overflow_streak": float(self.overflow_streak),
            "overflow_frac": self.overflow_steps / self.steps if self.steps else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own entries, and the counters under an additional key that torch's scaler ignores."""
        counters = {name: getattr(self, name) for name in (*_COUNTERS, "init_scale")}
        return {**super().state_dict(), STATE_KEY: counters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore scale, growth tracker and counters from this scaler's state, or from torch's, which has no counters.

        The constructor's settings stay, because an old checkpoint must not undo a changed configuration; a warning names each
        setting that differs. If the saved scale started from another `init_scale`, the scale starts again from the present
        one. Raises PrecisionError for a state that is empty, incomplete, or holds a scale out of range.
        """
        ours = state_dict.get(STATE_KEY, dict.fromkeys(_COUNTERS, 0))
        missing = [key for key in ("scale", "_growth_tracker") if key not in state_dict]
        if missing or not all(type(ours.get(name)) is int for name in _COUNTERS):
            raise PrecisionError(
                f"the loss-scaler state lacks {', '.join(missing) or 'its counters'} (it has: "
                f"{', '.join(state_dict) or 'nothing'}); an empty one was saved by a disabled scaler, so that run trained "
                "without loss scaling. Delete it to start from init_scale."
            )
        scale = float(state_dict["scale"])
        if not MIN_SCALE <= scale < math.inf:
            raise PrecisionError(
                f"the loss-scaler state holds scale={scale!r}; allowed: a finite number >= {MIN_SCALE:g}. Resume from an earlier "
                "checkpoint."
            )
        interval = self.get_growth_interval()
        if state_dict.get("growth_interval", interval) != interval:
            warnings.warn(
                f"the checkpoint's loss scaler had growth_interval={state_dict['growth_interval']!r}; the configured "
                f"{interval!r} is used.",
                stacklevel=2,
            )
        tracker, before = state_dict["_growth_tracker"], ours.get("init_scale", self.init_scale)
        if before != self.init_scale:
            warnings.warn(
                f"the checkpoint's loss scaler began with init_scale={before!r} and had come to {scale:g}; the configured "
                f"{self.init_scale!r} is used, and the loss scale begins anew from it.",
                stacklevel=2,
            )
            scale, tracker = self.init_scale, 0
        factors = {"growth_factor": GROWTH_FACTOR, "backoff_factor": BACKOFF_FACTOR, "growth_interval": interval}
        super().load_state_dict({"scale": scale, "_growth_tracker": tracker, **factors})
        for name in _COUNTERS:
            setattr(self, name, ours[name])
        if before != self.init_scale:
            self.overflow_streak = 0


def _overflowed(state: dict[str, Any]) -> bool:
    """Tell whether an optimizer's gradients overflowed in this step."""
    return any(bool(value.item()) for value in state["found_inf_per_device"].values())
