"""SGLang casts a weight update to its own dtype: a weight beyond float16 becomes infinite, and the update succeeds."""

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader

PEER = "sglang"
REPORTED = "not reported"
WORKAROUND = "`update_weights` (adapters/sglang/weights.py) casts before it sends, and names the tensor that overflows"
EXPECTED = "an error, or finite"
WEIGHT = torch.tensor([[1e5, 1.0]], dtype=torch.bfloat16)


def seen() -> str:
    """Return what a float16 engine's parameter holds after an update with a bfloat16 weight of 1e5."""
    parameter = torch.nn.Parameter(torch.zeros(1, 2, dtype=torch.float16), requires_grad=False)
    default_weight_loader(parameter, WEIGHT)
    return "an error, or finite" if parameter.isfinite().all() else f"{parameter[0, 0].item()}, and no error"


def with_workaround() -> str:
    """Send it by this package, to an engine that only unpacks what arrives."""
    from types import SimpleNamespace

    from mismatch_ext.adapters.sglang.weights import update_weights

    engine = SimpleNamespace(dtype="float16", copies=1, update_weights=lambda buckets, weight_version: list(buckets))
    update_weights(engine, [("weight", WEIGHT)], dtype="float16")
    return seen()


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
