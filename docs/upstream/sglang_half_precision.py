"""SGLang's `dtype="auto"` runs a float32 checkpoint in float16, and its report says "auto"."""

from sglang.srt.configs.model_config import _get_and_verify_dtype
from transformers import Qwen3Config

PEER = "sglang"
REPORTED = "not reported"
WORKAROUND = "`check_server` (adapters/sglang/server.py) names a server's `auto`, and the flag"
EXPECTED = "torch.float32"


def seen() -> str:
    """Return the dtype that a float32 checkpoint is served in."""
    return str(_get_and_verify_dtype(Qwen3Config(dtype="float32"), "auto"))


def with_workaround() -> str:
    """Ask this package for its verdict on a server that was started so."""
    import sglang
    from mismatch_ext.adapters.sglang import check_server

    from mismatch_ext.config import MismatchConfig
    from mismatch_ext.errors import PrecisionError

    report = {"version": sglang.__version__, "dtype": "auto", "kv_cache_dtype": "auto"}
    for problem in check_server(report, config=MismatchConfig(), trainer_dtype="float32").problems:
        if problem.field == "dtype":
            raise PrecisionError(str(problem))
    return seen()


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
