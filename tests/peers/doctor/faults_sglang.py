"""Faults that are planted in a real SGLang, or in what it is asked; run in the environment that has SGLang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.peers.doctor.faults import (
    CONFIG,
    EXPERTS,
    PROMPT,
    REQUESTS,
    WEIGHTS,
    Planted,
    table,
)

# A scheduler that waits would take a core from the trainer's side.
STARTED = {"sleep_on_idle": True}


def asked(**sampling: Any) -> dict[str, Any]:
    """Return the fields of a run whose requests have these settings."""
    return {"sampling": {"temperature": 1.0} | sampling}


def with_sglang(planted: Planted, **run: Any) -> Planted:
    """Return a fault of vLLM as one of SGLang."""
    return replace(planted, run={**planted.run, "sampling": {}, "engine": "sglang", "arguments": STARTED, **run})


def hidden(near: tuple[float, float], **sampling: Any) -> Planted:
    """Return a truncation: SGLang reports log-probabilities from before it, so that the tokens alone show it."""
    return with_sglang(Planted(expected=tuple(sampling), near=near), **asked(**sampling))


RUNS: dict[str, dict[str, Planted]] = {
    "requests": {
        "clean": with_sglang(Planted()),
        "clean, temperature 0.7": with_sglang(Planted(run={"temperature": 0.7}), **asked(temperature=0.7)),
        "temperature 0.94, trainer 1": with_sglang(REQUESTS["temperature 0.94, trainer 1"], **asked(temperature=0.94)),
        "frequency_penalty 0.27": with_sglang(REQUESTS["frequency_penalty 0.27"], **asked(frequency_penalty=0.27)),
        "repetition_penalty 1.07": with_sglang(REQUESTS["repetition_penalty 1.07"], **asked(repetition_penalty=1.07)),
        "logit_bias of 0.6": with_sglang(REQUESTS["logit_bias of 0.6"], **asked(logit_bias={"7": 0.6})),
        "min_new_tokens 20": with_sglang(Planted(expected=("min_tokens",), near=(20, 20)), **asked(min_new_tokens=20)),
        "top_p 0.8": hidden((0.75, 0.86), top_p=0.8),
        "top_k 4": hidden((4, 4), top_k=4),
        "min_p 0.15": hidden((0.12, 0.2), min_p=0.15),
        "a prompt without its first 2 tokens": with_sglang(PROMPT["a prompt without its first 2 tokens"]),
    },
    "engine": {
        "rope_theta x 1.13": with_sglang(CONFIG["rope_theta x 1.13"]),
        "fp8 weights": with_sglang(WEIGHTS["fp8 weights"]),
        "the last of three older checkpoints": with_sglang(WEIGHTS["the last of three older checkpoints"]),
        "experts x 1.08": with_sglang(EXPERTS["experts x 1.08"]),
    },
}


def named(runs: str, out: str) -> dict[str, Any]:
    """Return what each fault was called."""
    return {"table": table(RUNS[runs], Path(out))}
