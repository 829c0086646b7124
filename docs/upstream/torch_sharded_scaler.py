"""ShardedGradScaler, made as FSDP's documentation makes it, scales nothing on a machine without CUDA: float16 underflows."""

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

PEER = "torch"
REPORTED = "not reported"
WORKAROUND = "`LossScaler` (mismatch_ext/precision/scaler.py) is made for the gradients' device, and refuses to be off"
EXPECTED = 1.0


def seen(make=ShardedGradScaler) -> float:
    """Return the gradient of x * 2**-13 * 2**-13 in units of 2**-26, which float16 has no number for, scaled and unscaled."""
    scaler = make(init_scale=2.0**13)
    small, weight = torch.tensor(2.0**-13).half(), torch.ones(1, requires_grad=True)
    scaler.scale((weight.half() * small * small).float()).backward()
    return float(weight.grad) / scaler.get_scale() * 2.0**26


def with_workaround() -> float:
    """Scale by this package's scaler."""
    from mismatch_ext.precision.scaler import LossScaler

    return seen(lambda init_scale: LossScaler("cpu", init_scale=init_scale))


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
