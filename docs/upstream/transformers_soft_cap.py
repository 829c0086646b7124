"""transformers loads Gemma-2 with `sdpa`, which leaves out the soft cap of its attention: another policy than an engine's."""

import torch
from transformers import AutoModelForCausalLM, Gemma2Config

PEER = "transformers"
REPORTED = "not reported"
WORKAROUND = "set `attn_implementation: eager`; a run warns at its start, and `mismatch-ext doctor` names it in a gap"
EXPECTED = 0
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 32}
CONFIG = Gemma2Config(num_attention_heads=2, num_key_value_heads=2, initializer_range=0.5, **SIZES)
TOKENS = torch.arange(64)[None]


def logprobs(**settings) -> torch.Tensor:
    """Return the log-probabilities of some tokens, of the same weights each time."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, **settings).eval()
    with torch.no_grad():
        return model(TOKENS).logits.log_softmax(-1)


def seen(**settings) -> float:
    """Return how far a model is from its own code, which has the cap, in nats per token."""
    return round(float((logprobs(**settings) - logprobs(attn_implementation="eager")).abs().mean()), 4)


def with_workaround() -> float:
    return seen(attn_implementation="eager")


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
