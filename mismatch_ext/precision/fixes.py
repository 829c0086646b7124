"""Advice, in the host's own terms, if a trainer does not compute as asked; the audit's findings end with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainerFixes:
    """One piece of advice per problem; the defaults are for a training loop of your own, and each adapter gives its host's.

    Args:
        masters: For weights that are not float32.
        autocast_off: For autocast that is on although float32 was asked for.
        autocast: For autocast that is off or in another dtype; `{dtype}` is the one asked for, `{flag}` its entry in `flags`.
        float16_on_cpu: For autocast that is off on a CPU although float16 was asked for; None takes `autocast`.
        flags: The host's setting for each dtype.
        reduction: For gradients that are summed in a half dtype.
    """

    masters: str = "Load the model in float32 (dtype='float32') and let autocast compute in the half dtype"
    autocast_off: str = "Take torch.autocast off the forward passes"
    autocast: str = "Run the forward passes under torch.autocast(dtype=torch.{dtype}); see that no wrapper ends it."
    float16_on_cpu: str | None = None
    flags: tuple[tuple[str, str], ...] = ()
    reduction: str = "Set reduce_dtype of the sharding's mixed-precision policy to float32"

    def for_autocast(self, dtype: str, *, off_on_cpu: bool) -> str:
        """Return the advice for autocast that is not as asked for.

        Args:
            dtype: The compute dtype asked for.
            off_on_cpu: Whether the device is a CPU and autocast is off.
        """
        if dtype == "float32":
            return f"{self.autocast_off}: float32 was asked for."
        if off_on_cpu and dtype == "float16" and self.float16_on_cpu is not None:
            return self.float16_on_cpu
        return self.autocast.format(dtype=dtype, flag=dict(self.flags).get(dtype, ""))
