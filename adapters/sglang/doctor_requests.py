"""The doctor's requests to SGLang, in this process or over HTTP, and how it reads the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mismatch_ext.adapters.sglang.probes import SCORING, token_scores
from mismatch_ext.adapters.sglang.request import generate_request
from mismatch_ext.adapters.sglang.response import to_records, to_traces

from mismatch_ext.doctor import Sample
from mismatch_ext.doctor.asking import ToSample, sequences
from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.provenance import to_provenance
from mismatch_ext.records import SamplingSettings
from mismatch_ext.routing import RoutingShape

SEED = "sampling_seed"
OTHERS = {"max_new_tokens": "--max-tokens", "n": "--responses"}
"""Arguments of SGLang's requests that the doctor sets from options of its own."""
Generate = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Maps a batch, as `generate_request` builds it, to a response for each of its prompts, in their order."""


def sampled(generate: Generate, reading: EngineReading, asked: ToSample, shape: RoutingShape | None = None) -> Sample:
    """Sample responses as a run does.

    Args:
        generate: Sends a batch to the engine.
        reading: Dtypes and modes that the engine runs with.
        asked: Prompts and settings; its `sampling` holds SGLang's `sampling_params`, and the engine fills in those that are left
            out, for example from `preferred_sampling_params`. Response i of the sample is drawn with `sampling_seed` + i, which
            only a deterministic engine uses; any other engine draws all responses from its `random_seed`.
        shape: Shape of the routes that the engine records; None reads no routes.

    Raises:
        ConfigError: A sampling argument sets what an option of the doctor sets.
        EngineError: SGLang aborted a request.
        RecordError: A response of SGLang's is malformed.
    """
    sampling, shape = asked.sampling, asked.routed(shape)
    for name, option in OTHERS.items():
        if name in sampling:
            raise ConfigError(f"--sampling: {name} is what {option} says; leave it out.")
    prompts = [prompt for prompt in asked.given for _ in range(asked.of_each)]
    seeds = [int(sampling.get(SEED, 0)) + row for row in range(len(prompts))]
    request = generate_request(prompts, SamplingSettings(), max_new_tokens=asked.max_tokens, routing=shape is not None)
    # The run's requests do the same: the engine fills in the settings that they leave out.
    request["sampling_params"] = [
        {**sampling, "max_new_tokens": asked.max_tokens, "n": 1, SEED: seed} for seed in seeds
    ]
    provenance = to_provenance(reading, sampling=asked.settings, weight_version=0)
    return asked.sampled(to_records(generate(request), prompt_ids=prompts, provenance=provenance, shape=shape))


def scored(generate: Generate, sample: Sample, shape: RoutingShape | None = None) -> Sample:
    """Return the same tokens with the log-probabilities that the engine gives them as part of a prompt, at temperature 1.

    Args:
        generate: Sends a batch to the engine.
        sample: The tokens.
        shape: Shape of the routes that the engine records; None reads no routes.

    Raises:
        RecordError: A response of SGLang's is malformed.
    """
    whole = sequences(sample)
    request = generate_request(whole, SCORING, max_new_tokens=0, prompt_logprobs=True, routing=shape is not None)
    outputs = generate(request)
    largest = max(map(max, whole))
    logprobs = []
    for row, (output, prompt, ids) in enumerate(zip(outputs, sample.prompts, whole, strict=True)):
        # The first token has no log-probability.
        logprobs.append(tuple(token_scores(output, ids, row, largest)[len(prompt) - 1 :]))
    routes = None
    if shape is not None:
        routes = tuple(to_traces(outputs, prompt_ids=whole, shape=shape, version=0))
    return replace(sample, logprobs=tuple(logprobs), routes=routes)
