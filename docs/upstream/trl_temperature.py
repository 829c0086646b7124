"""GRPOConfig takes another temperature for the engine than the trainer scores with: every ratio is that of two temperatures."""

import torch
from trl import GRPOConfig

PEER = "trl"
REPORTED = "not reported"
WORKAROUND = "`sampling_settings` (adapters/trl/config.py) refuses it before the engine starts"
LOGITS = torch.tensor([2.0, 0.5, -1.0])
EXPECTED = 0.0


def seen(check=lambda config: None) -> float:
    """Return how far log-probabilities are apart that vLLM reports (processed) and TRL computes, of the same logits."""
    config = GRPOConfig(use_cpu=True, bf16=False, temperature=1.0, generation_kwargs={"temperature": 0.7})
    check(config)
    engine = config.generation_kwargs["temperature"]
    return float(((LOGITS / engine).log_softmax(0) - (LOGITS / config.temperature).log_softmax(0)).abs().max())


def with_workaround() -> float:
    """Ask this package's configuration for it."""
    from mismatch_ext.adapters.trl.config import sampling_settings

    return seen(lambda config: sampling_settings(config, config.generation_kwargs))


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
