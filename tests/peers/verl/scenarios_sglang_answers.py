"""Answers of verl's SGLang server that verl could not use, in the process of the server; no SGLang is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from mismatch_ext.adapters.sglang import to_provenance
from mismatch_ext.adapters.verl.rollout.sglang_server import _OF_VERL, MismatchSGLangServer

from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.rollout import SamplingSettings
from tests.peers.verl.recorded import recorded

READING = EngineReading(**recorded("sglang")["rollouts"][0]["reports"][0]["reading"])


def answers() -> dict[str, Any]:
    """Let answers come without a log-probability, and with a bug of ours in the check, by whether the config acts."""
    found: dict[str, Any] = {}
    for name, acts in (("acts", True), ("measures", False)):
        for case in ("null", "routes", "bug"):
            found[f"{name} {case}"] = asyncio.run(_asked(acts, case))
    return found


async def _asked(acts: bool, case: str) -> dict[str, Any]:
    logprobs = [[-1.0, 5, None], [None if case == "null" else -2.0, 6, None]]
    meta: dict[str, Any] = {
        "id": "r", "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 3, "completion_tokens": 2,
        "output_token_logprobs": logprobs, "weight_version": "default",
    }  # fmt: skip
    if case == "routes":
        meta["routed_experts"] = "text of SGLang's"

    async def generate(request: Any, *args: Any, **kwargs: Any) -> Any:
        yield {"output_ids": [5, 6], "text": "", "meta_info": meta}

    server: Any = object.__new__(MismatchSGLangServer)
    server._generate, server._acts, server._refusals = generate, acts, []
    server.config = SimpleNamespace(enable_rollout_routing_replay=case == "routes")
    # An attribute that the check of routes needs is missing: in a server whose config acts that is a bug, too.
    server._provenance = (
        None if case == "bug" else to_provenance(READING, sampling=SamplingSettings(), weight_version=0)
    )
    request = SimpleNamespace(
        input_ids=[1, 2, 3], rid="r", image_data=None, video_data=None, return_logprob=True,
        sampling_params={"max_new_tokens": 2},
    )  # fmt: skip
    if case == "bug":
        del request.rid  # which the check reads first
    token, outputs, error = _OF_VERL.set(True), [], ""
    try:
        async for output in server._generate_checked(request):
            outputs.append(output)
    except Exception as raised:  # noqa: BLE001 - what it is, the test says
        error = type(raised).__name__
    finally:
        _OF_VERL.reset(token)
    refused, messages = await server.mismatch_refusals()
    return {
        "error": error, "refused": refused, "messages": messages,
        "same": [output["meta_info"] is meta and meta.get("routed_experts", "") for output in outputs],
    }  # fmt: skip
