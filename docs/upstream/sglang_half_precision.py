"""SGLang's `dtype="auto"` runs a float32 checkpoint in float16, and its report says "auto"."""

from sglang.srt.configs.model_config import _get_and_verify_dtype
from transformers import Qwen3Config

PEER = "sglang"
REPORTED = "not reported"
WORKAROUND = "`precision_problems` (adapters/sglang/server_checks.py) names a server's `auto`, and the flag"
EXPECTED = "torch.float32"


def seen() -> str:
    """Return the dtype that a float32 checkpoint is served in."""
    return str(_get_and_verify_dtype(Qwen3Config(dtype="float32"), "auto"))


def with_workaround() -> str:
    """Ask this package for its verdict on a server that was started so."""
    from mismatch_ext.adapters.sglang.server_checks import precision_problems

    from mismatch_ext.errors import PrecisionError
    from mismatch_ext.precision.audit import EngineReading
    from mismatch_ext.precision.policy import PrecisionPolicy

    read = {"model_dtype": "auto", "kv_cache_dtype": "auto", "logprobs_mode": "processed_logprobs"}
    reading = EngineReading(engine="sglang", version="0", parameter_dtypes={}, quantization=None, **read)
    problems = precision_problems(reading, PrecisionPolicy("float32"))
    if any(problem.field == "dtype" for problem in problems):
        raise PrecisionError(str(problems[0]))
    return seen()


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
