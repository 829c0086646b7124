"""`mismatch-ext doctor --rollouts`: what real vLLM sampled is logged, and the fault is to be named from the file alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.examining import examine_logged
from mismatch_ext.adapters.transformers.doctor.models import load_model, routing_shape

from mismatch_ext.doctor import Diagnosis, Sample, read_rollouts, write_rollouts
from mismatch_ext.rollout import Provenance, RolloutRecord, SamplingSettings
from tests.peers.doctor.faults import (
    CLEAN,
    CLEAN_EXPERTS,
    CONFIG,
    EXPERTS,
    PROMPT,
    REQUESTS,
    RESPONSES,
    WEIGHTS,
    Engines,
    Planted,
    cannot,
    plant,
    said,
    some,
    wrong,
)

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1500)]


def logged(sample: Sample, path: Path, dtype: str, *, routes: bool) -> None:
    """Log what an engine sampled, as a run would."""
    known = Provenance(
        engine="vllm", engine_version="installed", dtype=dtype, kv_cache_dtype=None, weight_version=0, patch_digest="none",
        sampling=SamplingSettings(), logprobs_mode="processed_logprobs",
    )  # fmt: skip
    columns = (sample.prompts, sample.responses, sample.logprobs, sample.masks)
    traces = sample.routes or (None,) * len(sample.responses)
    write_rollouts(
        (
            RolloutRecord(
                prompt_ids=prompt, response_ids=response, rollout_logprobs=logprobs, response_mask=mask, finish_reason=None,
                provenance=known, routing=trace,
            )
            for prompt, response, logprobs, mask, trace in zip(*columns, traces, strict=True)
        ),
        path,
        routes=routes,
    )  # fmt: skip


def examined(planted: Planted, folder: Path, engines: Engines, *, routes: bool = True) -> Diagnosis:
    """Plant a fault, log what is sampled, and have the doctor look at the file."""
    run, prompts, seen = plant(planted, folder, engines)
    engine = run.start(routing_shape(load_model(run.model)))
    sample = engine.sample(
        ToSample(prompts=prompts, responses=RESPONSES, max_tokens=planted.tokens, sampling=run.sampling, seen=seen)
    )
    logged(sample, folder / "rollouts.jsonl", run.dtype, routes=routes)
    return examine_logged(run, read_rollouts(folder / "rollouts.jsonl"))


def table(runs: Mapping[str, Planted], folder: Path) -> dict[str, str]:
    """Return what each fault was called, and hold that the names are right."""
    found, mistakes, engines = {}, [], Engines()
    try:
        for number, (name, planted) in enumerate(runs.items()):
            if reason := cannot(planted):
                found[name] = reason
                continue
            (folder / str(number)).mkdir()
            seen = examined(planted, folder / str(number), engines, routes="no routes" not in name)
            found[name] = "; ".join(said(seen))
            mistakes += [f"{name}: {mistake}: {found[name]}"] if (mistake := wrong(planted, seen)) else []
    finally:
        engines.end()
    assert not mistakes, "\n".join(mistakes)
    return found


def test_faults_of_requests_are_named_from_a_log(tmp_path: Path) -> None:
    """From logged rollouts alone the doctor names other sampling settings and prompts, and nothing on a clean run."""
    runs = some(CLEAN, "clean") | some(REQUESTS, "temperature 0.94, trainer 1", "top_p 0.88", "top_k 4")
    runs |= some(REQUESTS, "min_p 0.07", "repetition_penalty 1.07")
    runs |= some(PROMPT, "an extra token first", "a prompt without its first 2 tokens")
    table(runs, tmp_path)


def test_faults_of_an_engine_are_named_from_a_log(tmp_path: Path) -> None:
    """From logged rollouts alone the doctor names another configuration, other weights and another cache of an engine."""
    runs = some(CONFIG, "rope_theta x 1.13", "norm epsilon x 43, float16")
    runs |= some(WEIGHTS, "fp8 KV cache", "fp8 weights", "the last of three older checkpoints")
    runs |= some(WEIGHTS, "engine float16, trainer bfloat16")
    table(runs, tmp_path)


def test_faults_are_named_from_a_log_with_routes(tmp_path: Path) -> None:
    """From logged rollouts and routes alone the doctor names what an engine with experts does otherwise."""
    runs = some(CLEAN_EXPERTS, "clean, experts")
    runs |= some(EXPERTS, "rope_theta x 1.13, experts")
    runs["top_p 0.91, experts, no routes in the file"] = EXPERTS["top_p 0.91, experts"]
    table(runs, tmp_path)
