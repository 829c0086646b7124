"""vLLM's GPU runner draws a seed for each request without one from NumPy's global generator, even if the request is greedy."""

from types import SimpleNamespace

import numpy as np
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.states import SamplingStates

PEER = "vllm"
REPORTED = "not reported"
WORKAROUND = "`prefill_params` (adapters/vllm/probes.py) gives each probe a seed"
EXPECTED = 0.549
PROBE = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
STATES = object.__new__(SamplingStates)
STATES.vocab_size, STATES.seeds_set, STATES.num_logprobs = 100, np.zeros(4, bool), np.zeros(4, np.int32)
for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
    setattr(STATES, name, SimpleNamespace(np=np.zeros(4, np.int64)))


def seen(request=PROBE) -> float:
    """Return what a reward function draws from NumPy after a request that only scores its prompt; with `seed(0)` it is 0.549."""
    np.random.seed(0)
    STATES.add_request(0, request)
    return round(float(np.random.random()), 3)


def with_workaround() -> float:
    from mismatch_ext.adapters.vllm.probes import prefill_params

    return seen(prefill_params())


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
