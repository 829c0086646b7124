"""The three compute dtypes, and what one uniform precision asks for. Without torch, so that a block is read quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mismatch_ext.errors import PrecisionError

if TYPE_CHECKING:
    import torch

NAMES = ("float32", "float16", "bfloat16")
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Short names, as in the arguments of trainers and engines."""
ALIASES = {name: name for name in NAMES} | {short: name for name, short in SHORT.items()}
ALIASES |= {"float": "float32", "half": "float16"}
"""Canonical name of each accepted name."""
MEANT = ALIASES | {
    "f32": "float32",
    "single": "float32",
    "full": "float32",
    "32": "float32",
    "f16": "float16",
    "16": "float16",
}
"""Canonical name that a user probably means: also by names that are not accepted, as "16" is two dtypes."""
LOGPROBS_MODE = "processed_logprobs"
"""Which log-probabilities an engine must return: those that it samples from, after the temperature."""


def _bare(dtype: object) -> str:
    return str(dtype).lower().removeprefix("torch.")


def spelled(dtype: object) -> str:
    """Return the canonical name of a dtype that was read from a peer, or its lower-case name if it has none."""
    return ALIASES.get(_bare(dtype), _bare(dtype))


def canonical(dtype: str | torch.dtype) -> str:
    """Return the canonical name of a compute dtype; raises PrecisionError for any other, such as "auto"."""
    if _bare(dtype) not in ALIASES:
        raise PrecisionError(
            f"dtype {str(dtype)!r} is not a compute dtype; allowed: {', '.join(NAMES)} (or {', '.join(ALIASES)})."
        )
    return ALIASES[_bare(dtype)]


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of a name or alias."""
    import torch

    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[canonical(dtype)]


def limits(dtype: str | torch.dtype) -> torch.finfo:
    """Return the limits of a compute dtype."""
    import torch

    return torch.finfo(torch_dtype(dtype))


def coarser(first: str | torch.dtype, second: str | torch.dtype) -> str:
    """Return the dtype with the larger eps; it determines the gap between two sides that compute in these dtypes."""
    return max(canonical(first), canonical(second), key=lambda name: float(limits(name).eps))


def is_finer(first: object, second: object) -> bool:
    """Tell whether a dtype has a smaller eps than another; False if either is none of the three compute dtypes."""
    names = (spelled(first), spelled(second))
    return set(names) <= set(NAMES) and limits(names[0]).eps < limits(names[1]).eps


@dataclass(frozen=True, kw_only=True)
class TrainerFixes:
    """Advice per problem, in the host's own terms; the defaults are for a training loop of your own."""

    masters: str = "Load the model in float32 (dtype='float32') and let autocast compute in the half dtype"
    autocast_off: str = "Take torch.autocast off the forward passes"
    # `{dtype}` is the dtype asked for, and `{flag}` its entry in `flags`.
    autocast: str = "Run the forward passes under torch.autocast(dtype=torch.{dtype}); see that no wrapper ends it."
    float16_on_cpu: str | None = None  # takes its place where autocast is off on a CPU
    flags: tuple[tuple[str, str], ...] = ()
    head: str = (
        "Let TrainedModel set the head by mismatch.precision.head, and see that nothing replaces the head's forward"
    )
    reduction: str = "Set reduce_dtype of the sharding's mixed-precision policy to float32"

    def for_autocast(self, dtype: str, *, off_on_cpu: bool) -> str:
        """Return the advice for autocast that is not as asked for; `off_on_cpu`: it is off, and the device is a CPU."""
        if dtype == "float32":
            return f"{self.autocast_off}: float32 was asked for."
        if off_on_cpu and dtype == "float16" and self.float16_on_cpu is not None:
            return self.float16_on_cpu
        return self.autocast.format(dtype=dtype, flag=dict(self.flags).get(dtype, ""))
