"""vLLM's CPU kernel writes keys and values into an fp8 cache by cutting off the mantissa: 3 % too small on average."""

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

PEER = "vllm"
REPORTED = "not reported"
WORKAROUND = "`audit` (mismatch_ext/precision) refuses an fp8 cache; `mismatch-ext doctor` names it in a gap"
KEY = 1.1171875
EXPECTED = float(torch.tensor(KEY).to(torch.float8_e4m3fn))


def seen() -> float:
    """Return what the cache holds of a key of 1.1171875, whose nearest e4m3 number is 1.125."""
    current_platform.import_kernels()
    keys = torch.full((32, 2, 32), KEY, dtype=torch.bfloat16)
    cache = torch.zeros(1, 2, 64, 32, dtype=torch.uint8)
    held, _ = halves = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, keys, *halves, torch.arange(32), "vec", 1.0, 1.0, "fp8_e4m3")
    return float(held.unique().view(torch.float8_e4m3fn).float())


def with_workaround() -> float:
    """Audit an engine with such a cache as every run is."""
    from mismatch_ext.config import PrecisionConfig
    from mismatch_ext.precision.audit import AuditReport, EngineReading, engine_checks

    held = {"model_dtype": "bfloat16", "parameter_dtypes": {}, "logprobs_mode": "", "quantization": None}
    reading = EngineReading(engine="vllm", version="0", kv_cache_dtype="fp8_e4m3", **held)
    checks = engine_checks(PrecisionConfig(dtype="bfloat16"), reading)
    AuditReport(dtype="bfloat16", checks=tuple(checks)).raise_for_findings()
    return seen()


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
