"""With `generation_kwargs={"logprobs": 1}` TRL takes the likeliest token's log-probability for that of the sampled one."""

from types import SimpleNamespace as Of

from trl.generation.vllm_generation import extract_logprobs
from vllm.logprobs import Logprob

PEER = "trl"
REPORTED = "not reported"
WORKAROUND = "`sampling_settings` (adapters/trl/config.py) refuses it before the engine starts"
EXPECTED = -3.0


def seen() -> float:
    """Return what `_generate_single_turn` keeps of a token that was sampled with log-probability -3."""
    position = {7: Logprob(-3.0, rank=2), 5: Logprob(-0.05, rank=1)}
    output = Of(outputs=[Of(token_ids=[7], logprobs=[position])])
    rows, _ = extract_logprobs([output])
    return rows[0][0][0]


def with_workaround() -> float:
    """Ask this package's configuration for it."""
    from mismatch_ext.adapters.trl.config import sampling_settings
    from trl import GRPOConfig

    config = GRPOConfig(use_cpu=True, bf16=False, generation_kwargs={"logprobs": 1})
    sampling_settings(config, config.generation_kwargs)
    return seen()


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
