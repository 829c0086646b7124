"""`mismatch-ext gate`: batches at learning rate 0, with the weights sent before each, and a table that admits a model or not."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from time import perf_counter
from typing import Protocol, cast

import numpy as np
import torch
from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.blocks import alike, compared, equal_shares, hidden_states
from mismatch_ext.adapters.doctor.command import host_of, prompts_of
from mismatch_ext.adapters.doctor.examining import size_quickly
from mismatch_ext.adapters.doctor.options import asked_of, configure_prompts, configure_sides
from mismatch_ext.adapters.doctor.progress import GATE, Progress
from mismatch_ext.adapters.doctor.server import SEEDS
from mismatch_ext.adapters.doctor.sides import DoctorsEngine, ReadBack, Run, in_live_dtype
from torch import Tensor, nn

from mismatch_ext.cli import folder
from mismatch_ext.doctor import Sample
from mismatch_ext.doctor.gate import Gate, measured
from mismatch_ext.doctor.sample import Floats
from mismatch_ext.errors import ConfigError
from mismatch_ext.files import write_whole
from mismatch_ext.precision.dtypes import torch_dtype
from mismatch_ext.terminal import say
from mismatch_ext.versions import installed

BATCHES, RESPONSES, QUICK = 8, 64, 2
# The engine starts with made-up weights, so that it can only agree if those that are sent arrive.
DUMMY = {"load_format": "dummy"}
# Variables by which engines and libraries promise equality, or change the last bit.
VARIABLES = (
    "VLLM_BATCH_INVARIANT",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "ATEN_CPU_CAPABILITY",
    "OMP_NUM_THREADS",
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
    "SGLANG_USE_CPU_ENGINE",
)

EPILOG = """example:
  mismatch-ext gate --model PATH --prompts prompts.txt --json gate.json

exit status: 0 if every figure is within its limit, 1 if one is not, 2 for an error; docs/doctor.md has more"""


class TakesWeights(DoctorsEngine, Protocol):
    """An engine that a trainer can send weights to."""

    def update(self, model: nn.Module) -> None:
        """Replace the engine's weights by a model's."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    configure_sides(parser, epilog=EPILOG)
    tokens = parser.add_argument_group("the tokens (one of the first two, or the run's own data set)")
    configure_prompts(tokens.add_mutually_exclusive_group())
    tokens.add_argument(
        "--batches", metavar="N", type=int, default=BATCHES, help=f"batches, each after an update (default: {BATCHES})"
    )
    tokens.add_argument(
        "--responses", metavar="N", type=int, help=f"of each batch (default: {RESPONSES}, or fewer with --quick)"
    )
    tokens.add_argument(
        "--quick", action="store_true", help=f"{QUICK} batches, which are smaller for a large vocabulary"
    )
    answer = parser.add_argument_group("the answer")
    answer.add_argument("--exact", action="store_true", help="pass only if both sides agree to the last bit")
    answer.add_argument("--json", metavar="FILE", type=folder, help="write the figures to this file, too")
    parser.set_defaults(
        engine_model=None, server=None, server_model=None, server_timeout=600.0, server_key=None, rollouts=None,
        weight_version=None, older=[],
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Print the page; the exit status is 0 if every figure keeps its limit, otherwise 1."""
    from mismatch_ext.adapters.transformers.doctor.models import ensure_checkpoint

    host = host_of(arguments)
    asked = asked_of(arguments, host)
    batches = QUICK if arguments.quick else arguments.batches
    if batches < 1:
        raise ConfigError(f"--batches: {batches} is not allowed; allowed: >= 1.")
    ensure_checkpoint("--model", asked.run.model)
    prompts = prompts_of(arguments, host, asked.run.model)
    with Progress("gate", GATE) as rung:
        gate = gated(
            asked.run, prompts, rung, batches=batches, responses=arguments.responses, max_tokens=asked.max_tokens,
            exact=arguments.exact, quick=arguments.quick, shortened=arguments.max_tokens is None,
        )  # fmt: skip
    if arguments.json is not None:
        write_whole(arguments.json, (json.dumps(gate.data(), indent=1) + "\n").encode(), make_folder=True)
    say(gate.page())
    return 0 if gate.passes else 1


def gated(
    sides: Run,
    prompts: Sequence[Sequence[int]],
    rung: Progress,
    *,
    batches: int,
    responses: int | None,
    max_tokens: int,
    exact: bool = False,
    quick: bool = False,
    shortened: bool = False,
) -> Gate:
    """Send the weights to a run's engine before each batch, sample, and measure how far engine and trainer are apart.

    Args:
        sides: The run; its engine starts with made-up weights unless its arguments say how it loads.
        prompts: Token ids of each prompt; they are used in turn.
        rung: Is told what is being done.
        batches: Number of batches.
        responses: Number of responses of each batch; None takes `RESPONSES`, or with `quick` what `size_quickly` says.
        max_tokens: Largest number of tokens of a response.
        exact: Ask for equality to the last bit.
        quick: Sample less of a large vocabulary.
        shortened: Whether `quick` may cut responses, too.
    """
    began = perf_counter()
    rung("engine", f"start of {sides.engine}")
    from mismatch_ext.adapters.transformers.doctor.models import load_model, routing_shape
    from mismatch_ext.adapters.transformers.doctor.scorer import Scorer
    from mismatch_ext.adapters.transformers.scoring import logits_width

    model = load_model(sides.model, config=sides.trainer_config)
    if responses is None:
        responses = RESPONSES
        if quick:
            affordable, max_tokens = size_quickly(logits_width(model), max_tokens, shortened=shortened)
            responses = min(RESPONSES, -(-affordable // batches))
    sides = replace(sides, arguments={**DUMMY, **sides.arguments})
    lengths = [len(prompt) + max_tokens for prompt in islice(cycle(prompts), responses)]
    engine = cast("TakesWeights", sides.start(routing_shape(model), lengths))
    notes: tuple[str, ...] = ()
    if isinstance(engine, ReadBack):
        sides, notes = in_live_dtype(sides, engine.reading.model_dtype)
    try:
        samples = _sampled_batches(
            engine, model, sides, prompts, rung, batches=batches, responses=responses, max_tokens=max_tokens
        )
        rung("engine's blocks")
        states = hidden_states(engine, samples[-1])
    finally:
        engine.shutdown()
    sample = Sample.joined(samples)
    rung("trainer", f"trainer's pass over {len(sample.row):,} tokens")
    trainer = _trainers(model, sides, sample)
    rung("oracle", "float32 oracle")
    scorer = Scorer(
        model, sample, trainer_dtype=sides.trainer_dtype, engine_dtype=sides.dtype, temperature=sides.temperature,
        trainer_weights=sides.trainer_weights, replays=sides.replays, head=sides.head, attention=sides.attention,
        computed=trainer.astype(np.float64),
    )  # fmt: skip
    lengths = [len(response) for response in sample.responses]
    made_up = sides.arguments["load_format"] == "dummy"
    looked = [
        f"looked at: {len(lengths)} responses of {min(lengths)} to {max(lengths)} tokens (at most {max_tokens}), "
        f"{len(sample.row):,} sampled tokens, {batches} batches",
        f"weights: sent {batches} times to an engine that started with {'made-up ones' if made_up else 'its own'}",
        f"seconds: {perf_counter() - began:.0f}",
        *notes,
    ]
    if exact:
        looked.append(f"flags: {', '.join(f'{name}={value}' for name, value in _flags(sides).items())}")
    if "float32" in (sides.dtype, sides.trainer_dtype):
        looked.append(f"rounding to float32 moves this model by {scorer.scores.float32_error:.2g} nats per token")
    rung("trainer's blocks")
    blocks, left_out = alike(scorer, compared(scorer, states))
    return measured(
        sample,
        scorer.scores,
        trainer,
        np.repeat(np.arange(batches), [len(part.row) for part in samples]),
        blocks=blocks,
        no_blocks=states.missing or left_out or "the two sides' layers are named otherwise",
        equal_blocks=equal_shares(scorer, states.rows, states.blocks),
        sides=f"`{sides.model}`: {sides.engine} {installed(sides.engine)} in {sides.dtype} against transformers "
        f"{installed('transformers')} in {sides.trainer_dtype}, padding: {sides.layout}",
        looked=[*looked, *([f"blocks: {left_out}"] if left_out and not exact else [])],
        exact=exact,
    )


def _sampled_batches(
    engine: TakesWeights,
    model: nn.Module,
    sides: Run,
    prompts: Sequence[Sequence[int]],
    rung: Progress,
    *,
    batches: int,
    responses: int,
    max_tokens: int,
) -> list[Sample]:
    """Send the weights before each batch, and sample it."""
    samples = []
    seed = SEEDS[sides.engine]
    for number in range(batches):
        rung("batches", f"batch {number + 1} of {batches}: weights are sent, {responses} responses sampled")
        engine.update(model)
        some = [prompts[(number * responses + at) % len(prompts)] for at in range(min(responses, len(prompts)))]
        sampling = {**sides.sampling, seed: int(sides.sampling.get(seed, 0)) + number * 2**16}
        asked = ToSample(prompts=some, responses=responses, max_tokens=max_tokens, sampling=sampling)
        samples.append(engine.sample(asked))
    return samples


def _trainers(model: nn.Module, sides: Run, sample: Sample) -> Floats:
    """Return the trainer's log-probabilities `[N]` by float32's log-softmax, as trainers and engines compute it: bits count."""
    from mismatch_ext.adapters.transformers.attention import trainer_implementation
    from mismatch_ext.adapters.transformers.doctor.models import routing_shape
    from mismatch_ext.adapters.transformers.doctor.scorer import as_trainer, passes, round_weights
    from mismatch_ext.adapters.transformers.head import head_of

    weights_dtype, shape = torch_dtype(sides.trainer_weights), routing_shape(model)
    head, attention = head_of(model) if sides.head else None, trainer_implementation(model, sides.attention)
    round_weights(model, weights_dtype)
    routes = sample.routes if sides.replays and shape is not None else None
    row_logprobs: dict[int, Tensor] = {}
    with as_trainer(model, torch_dtype(sides.trainer_dtype), weights_dtype, head, attention):
        for row, logits in passes(model, sample, routes, shape=shape, layout=sides.layout):
            ids = torch.tensor(sample.responses[row], device=logits.device)[:, None]
            logprobs = (logits.float() / sides.temperature).log_softmax(-1).gather(-1, ids)[:, 0]
            row_logprobs[row] = logprobs[torch.tensor(sample.masks[row])].cpu()
    return torch.cat([row_logprobs[row] for row in sorted(row_logprobs)]).numpy()


def _flags(sides: Run) -> dict[str, str]:
    """Return what decides about the last bit on either side."""
    return {
        **{f"{sides.engine}.{name}": str(value) for name, value in sides.arguments.items()},
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
        "torch.deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.threads": str(torch.get_num_threads()),
        "trainer.weights": sides.trainer_weights,
        "trainer.head": sides.head or sides.trainer_dtype,
    }
