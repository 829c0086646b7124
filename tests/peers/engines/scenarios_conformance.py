"""What both engines' adapters are held to: one description of a record, and vLLM's side of it.

SGLang's side is in `scenarios_sglang`, in an environment of its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mismatch_ext.config import MonitorConfig
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.rollout import RolloutRecord, SamplingSettings, collate
from mismatch_ext.routing import RoutingShape
from mismatch_ext.weights import NamedTensors, SyncVerdict, WeightVerifier, fingerprint


def described(record: RolloutRecord) -> dict[str, Any]:
    """Return every field of a record as JSON-able data, routes as nested lists."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    trace = record.routing
    fields["provenance"] = dataclasses.asdict(record.provenance)
    fields["routing"] = trace and {
        "experts": trace.experts.tolist(),
        "dtype": str(trace.experts.dtype),
        "layers": trace.layers,
        "num_experts": trace.num_experts,
        "start": trace.start,
        "versions": trace.versions,
    }
    return fields


def turned(
    engine: Any,
    outputs: Any,
    rows: list[list[int]],
    reading: EngineReading,
    sampling: SamplingSettings,
    shape: RoutingShape,
) -> list[dict[str, Any]]:
    """Turn what an engine returned into records, by the functions that every engine's adapter has under the same names."""
    provenance = engine.to_provenance(reading, sampling=sampling, weight_version=0)
    records = engine.to_records(outputs, prompt_ids=rows, provenance=provenance, shape=shape)
    traces = engine.to_traces(outputs, prompt_ids=rows, shape=shape, version=0)
    batch = collate(records)
    assert batch.provenance == provenance
    return [
        described(record) | {"same_traces": routes is record.routing and bool(routes and routes.same_as(trace))}
        for record, trace, routes in zip(records, traces, batch.routing or [None] * len(records), strict=True)
    ]


def vllm(model: str, sampling: dict[str, Any], rows: list[list[int]], count: int, **options: Any) -> dict[str, Any]:
    """Return the records of greedy rollouts of vLLM, field by field, and the verdicts on updates of its weights after them."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
    from mismatch_ext.adapters import vllm as engine
    from mismatch_ext.adapters.transformers import score_tokens
    from mismatch_ext.adapters.transformers.routing import moe_layout
    from mismatch_ext.patches.vllm.cpu_routes import cpu_routes_patches
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    from mismatch_ext.patching import applied

    settings = SamplingSettings(**sampling)
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    layout = moe_layout(trained)
    with applied(*cpu_routes_patches()):
        llm = LLM(
            model, dtype="float32", enforce_eager=True, max_model_len=256, seed=0, enable_return_routed_experts=True
        )
    engine.attach_cpu_routes(llm)
    parameters = SamplingParams(max_tokens=count, logprobs=0, **sampling, **options)
    outputs = llm.generate([{"prompt_token_ids": row} for row in rows], parameters, use_tqdm=False)
    records = turned(engine, outputs, rows, engine.read_engine(llm), settings, layout.shape)
    rollout = engine.Rollout(llm, settings, max_new_tokens=count)
    verified = Verified(rollout, trained.named_parameters, lambda ids: score_tokens(trained, ids), PROBES, "float32")
    updates = updated(verified, trained)
    engine.shutdown(llm)
    return {"records": records, "updates": updates}


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
        "saved": sorted(verified.verifier.state_dict()),
    }
