"""accelerate takes `mixed_precision="fp16"` on a CPU, and leaves autocast and loss scaler off without a word."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

PEER = "accelerate"
REPORTED = "not reported"
WORKAROUND = "`compute_in_float16` (adapters/accelerate/float16.py) switches autocast on, with a LossScaler"
EXPECTED = "torch.float16, with a scaler"


def seen(repair=lambda accelerator: None) -> str:
    """Return the dtype that a linear layer computes in, and whether there is a scaler that is on."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    repair(accelerator)
    with accelerator.autocast():
        dtype = torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype
    scales = accelerator.scaler is not None and accelerator.scaler.is_enabled()
    AcceleratorState._reset_state(True)
    return f"{dtype}, {'with a' if scales else 'no'} scaler"


def with_workaround() -> str:
    """Repair it as this package's trainer does."""
    from mismatch_ext.adapters.accelerate.float16 import compute_in_float16

    from mismatch_ext.config import PrecisionConfig

    return seen(lambda accelerator: compute_in_float16(accelerator, PrecisionConfig(dtype="float16")))


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
