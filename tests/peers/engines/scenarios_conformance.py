"""What both engines are held to: how right and wrong updates of their weights are told apart, and vLLM's side of it.

SGLang's side is in `scenarios_sglang`, in an environment of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mismatch_ext.config import MonitorConfig
from mismatch_ext.rollout import SamplingSettings
from mismatch_ext.weights import NamedTensors, SyncVerdict, WeightVerifier, fingerprint


def vllm(model: str) -> dict[str, Any]:
    """Return the verdicts on updates of vLLM's weights."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
    from mismatch_ext.adapters import vllm as engine
    from mismatch_ext.adapters.transformers import score_tokens
    from mismatch_ext.patches.vllm.cpu_routes import cpu_routes_patches
    from transformers import AutoModelForCausalLM
    from vllm import LLM

    from mismatch_ext.patching import applied

    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with applied(*cpu_routes_patches()):
        llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=256, seed=0)
    rollout = engine.Rollout(llm, SamplingSettings(), max_new_tokens=1)
    verified = Verified(rollout, trained.named_parameters, lambda ids: score_tokens(trained, ids), PROBES, "float32")
    updates = updated(verified, trained)
    engine.shutdown(llm)
    return {"updates": updates}


PROBES = torch.randint(2, 16, (8, 24), generator=torch.Generator().manual_seed(9))
LEAST = "model.norm.weight"
"""A tensor that is compared where tensors can be."""


class Verified:
    """A model whose weights are sent to an engine, each update verified: both score the same probes `[N, T]`."""

    def __init__(
        self,
        rollout: Any,
        parameters: Callable[[], NamedTensors],
        score: Callable[[Tensor], Tensor],
        probes: Tensor,
        dtype: str,
    ) -> None:
        self.rollout, self.parameters, self.score = rollout, parameters, score
        self.verifier = WeightVerifier(self, rollout, MonitorConfig(), probes, dtype=dtype)
        self.verifier.begin()

    def fingerprint(self) -> str:
        return fingerprint(self.parameters())

    def update(self) -> SyncVerdict:
        """Send the weights and verify them; a bad verdict raises."""
        _, samples = self.rollout.update(self.parameters())
        return self.verifier.verify(samples)

    def verify(self) -> SyncVerdict:
        """Judge whether the engine holds the present weights, whoever sent them."""
        return self.verifier.judge()


def updated(verified: Verified, model: nn.Module) -> dict[str, Any]:
    """Train a model and update an engine, rightly and wrongly; return the verdicts, or what was raised."""
    verdicts = {}

    def change(size: float) -> None:
        torch.manual_seed(int(1 / size))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(size * parameter.std(correction=0) * torch.randn_like(parameter))

    change(0.1)
    verdicts["trained and sent"] = verified.update()
    verdicts["sent again"] = verified.update()
    change(0.2)
    verdicts["trained"] = verified.verify()
    verdicts["sent"] = verified.update()
    change(0.25)
    send, verified.parameters = verified.parameters, lambda: iter([(LEAST, dict(model.named_parameters())[LEAST])])
    part = verified.update()
    verified.parameters = send
    verdicts["sent whole"] = verified.update()
    return {
        "statuses": {name: verdict.status for name, verdict in verdicts.items()},
        "messages": {name: verdict.message for name, verdict in verdicts.items()},
        "a part sent": part.message,
        "version": verified.rollout.weight_version,
    }
