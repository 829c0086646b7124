"""What a user has to change when a trainer does not compute as asked, in the host's own terms; ends the audit's findings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainerFixes:
    """Sentences by what was found; the defaults are for a loop of one's own, and an adapter gives those of its host.

    Args:
        masters: The weights are not float32.
        autocast_off: Autocast is on, and float32 was asked for.
        autocast: Autocast is off or in another dtype; `{dtype}` is the one asked for, `{flag}` what `flags` has for it.
        float16_on_cpu: Autocast is off on a CPU, and float16 was asked for; None says `autocast`.
        flags: Setting by dtype.
        reduction: Gradients are summed in a half dtype.
    """

    masters: str = "Load the model in float32 (dtype='float32') and let autocast compute in the half dtype"
    autocast_off: str = "Take torch.autocast off the forward passes"
    autocast: str = "Run the forward passes under torch.autocast(dtype=torch.{dtype}); see that no wrapper ends it."
    float16_on_cpu: str | None = None
    flags: tuple[tuple[str, str], ...] = ()
    reduction: str = "Set reduce_dtype of the sharding's mixed-precision policy to float32"

    def for_autocast(self, dtype: str, *, off_on_cpu: bool) -> str:
        """Return what to do where autocast is not as asked for.

        Args:
            dtype: The compute dtype asked for.
            off_on_cpu: Whether autocast is off, on a CPU.
        """
        if dtype == "float32":
            return f"{self.autocast_off}: float32 was asked for."
        if off_on_cpu and dtype == "float16" and self.float16_on_cpu is not None:
            return self.float16_on_cpu
        return self.autocast.format(dtype=dtype, flag=dict(self.flags).get(dtype, ""))
