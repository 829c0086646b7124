"""Recorded responses of SGLang, and small ones made for a test, with what a parser needs beside them."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
from mismatch_ext.adapters.sglang import RoutingShape

from mismatch_ext.rollout import Provenance, SamplingSettings

FOLDER = Path(__file__).resolve().parents[1] / "data/sglang"
SHAPE = RoutingShape(num_layers=2, layers=(0, 1), num_experts=8, top_k=2)


def provenance(temperature: float = 1.0, **changes: Any) -> Provenance:
    """Return a provenance at weight version 3."""
    fields: dict[str, Any] = {
        "engine": "sglang",
        "engine_version": "0.5.18",
        "dtype": "float16",
        "kv_cache_dtype": "auto",
        "weight_version": 3,
        "patch_digest": "none",
        "sampling": SamplingSettings(temperature=temperature),
        "logprobs_mode": "processed_logprobs",
    }
    return Provenance(**(fields | changes))


def recorded(name: str) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Return prompts and responses of a recording."""
    data = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return data["ids"], data["out"]


def routes(rows: int, layers: int = 2, experts: int = 8, top_k: int = 2) -> np.ndarray[Any, Any]:
    """Return ids `[rows, layers, top_k]`, int32, each row with distinct experts and no row like the one before."""
    first = np.arange(rows * layers).reshape(rows, layers, 1)
    return ((first + np.arange(top_k)) % experts).astype(np.int32)


def encoded(ids: np.ndarray[Any, Any]) -> str:
    """Encode ids as SGLang does."""
    return base64.b64encode(np.ascontiguousarray(ids).tobytes()).decode()


PROMPT = [11, 12, 13, 14]
RESPONSE = {
    "text": "",
    "output_ids": [21, 22, 23],
    "meta_info": {
        "id": "a1",
        "finish_reason": {"type": "stop", "matched": 23},
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "weight_version": "v7",
        "output_token_logprobs": [[-0.5, 21, None], [-1.5, 22, None], [-2.5, 23, None]],
        "output_token_logprobs_length": 3,
        "routed_experts": encoded(routes(6)),
    },
}


def response(drop: str | None = None, **meta: Any) -> dict[str, Any]:
    """Return a response to PROMPT of three tokens with six rows of routes, changed as told."""
    made = copy.deepcopy(RESPONSE)
    made["meta_info"].update(meta)  # type: ignore[attr-defined]
    if drop is not None:
        del made["meta_info"][drop]  # type: ignore[attr-defined]
    return made
