"""`mismatch-ext gate`: batches at learning rate 0, with the weights sent before each, and a table that admits a model or not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from time import perf_counter
from typing import Protocol, cast

import numpy as np
from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.blocks import HiddenStates, alike, compared, hidden_states
from mismatch_ext.adapters.doctor.command import host_of, prompts_of
from mismatch_ext.adapters.doctor.examining import size_quickly
from mismatch_ext.adapters.doctor.options import asked_of, configure_prompts, configure_sides
from mismatch_ext.adapters.doctor.progress import GATE, Progress
from mismatch_ext.adapters.doctor.server import SEEDS
from mismatch_ext.adapters.doctor.sides import DoctorsEngine, ReadBack, Run, in_live_dtype
from torch import nn

from mismatch_ext.cli import folder
from mismatch_ext.doctor import Sample
from mismatch_ext.doctor.gate import Gate, measured
from mismatch_ext.errors import ConfigError
from mismatch_ext.files import write_whole
from mismatch_ext.terminal import say
from mismatch_ext.versions import installed

BATCHES, RESPONSES, QUICK = 8, 64, 2
# The engine starts with made-up weights, so that it can only agree if those that are sent arrive.
DUMMY = {"load_format": "dummy"}

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
            quick=arguments.quick, shortened=arguments.max_tokens is None,
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
        quick: Sample less of a large vocabulary.
        shortened: Whether `quick` may cut responses, too.
    """
    from mismatch_ext.adapters.transformers.doctor.models import load_model
    from mismatch_ext.adapters.transformers.doctor.scorer import Scorer
    from mismatch_ext.adapters.transformers.scoring import logits_width

    began = perf_counter()
    rung("engine", f"start of {sides.engine}")
    model = load_model(sides.model, config=sides.trainer_config)
    if responses is None:
        responses = RESPONSES
        if quick:
            affordable, max_tokens = size_quickly(logits_width(model), max_tokens, shortened=shortened)
            responses = min(RESPONSES, -(-affordable // batches))
    sides, samples, states, notes = _sampled_batches(sides, model, prompts, rung, batches, responses, max_tokens)
    sample = Sample.joined(samples)
    rung("oracle", f"trainer and float32 oracle score {len(sample.row):,} tokens")
    scorer = Scorer(
        model, sample, trainer_dtype=sides.trainer_dtype, engine_dtype=sides.dtype, temperature=sides.temperature,
        trainer_weights=sides.trainer_weights, replays=sides.replays, layout=sides.layout, head=sides.head,
        attention=sides.attention, bare=True,
    )  # fmt: skip
    rung("trainer's blocks")
    blocks, left_out = alike(scorer, compared(scorer, states))
    lengths = [len(response) for response in sample.responses]
    loaded = "made-up ones" if sides.arguments["load_format"] == "dummy" else "its own"
    looked = [
        f"looked at: {len(lengths)} responses of {min(lengths)} to {max(lengths)} tokens (at most {max_tokens}), "
        f"{len(sample.row):,} sampled tokens, {batches} batches",
        f"weights: sent {batches} times to an engine that started with {loaded}",
        f"seconds: {perf_counter() - began:.0f}",
        *notes,
    ]
    if "float32" in (sides.dtype, sides.trainer_dtype):
        looked.append(f"rounding to float32 moves this model by {scorer.scores.float32_error:.2g} nats per token")
    return measured(
        sample,
        scorer.scores,
        np.repeat(np.arange(batches), [len(part.row) for part in samples]),
        blocks=blocks,
        no_blocks=states.missing or left_out or "the two sides' layers are named otherwise",
        sides=f"`{sides.model}`: {sides.engine} {installed(sides.engine)} in {sides.dtype} against transformers "
        f"{installed('transformers')} in {sides.trainer_dtype}, padding: {sides.layout}",
        looked=[*looked, *([f"blocks: {left_out}"] if left_out else [])],
    )


def _sampled_batches(
    sides: Run,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    rung: Progress,
    batches: int,
    responses: int,
    max_tokens: int,
) -> tuple[Run, list[Sample], HiddenStates, tuple[str, ...]]:
    """Start the engine, send the weights before each batch, and sample it.

    Returns the run as it started, each batch, the engine's blocks on the last one, and notes.
    """
    from mismatch_ext.adapters.transformers.doctor.models import routing_shape

    sides = replace(sides, arguments={**DUMMY, **sides.arguments})
    lengths = [len(prompt) + max_tokens for prompt in islice(cycle(prompts), responses)]
    engine = cast("TakesWeights", sides.start(routing_shape(model), lengths))
    notes: tuple[str, ...] = ()
    if isinstance(engine, ReadBack):
        sides, notes = in_live_dtype(sides, engine.reading.model_dtype)
    samples, seed = [], SEEDS[sides.engine]
    try:
        for number in range(batches):
            rung("batches", f"batch {number + 1} of {batches}: weights are sent, {responses} responses sampled")
            engine.update(model)
            some = [prompts[(number * responses + at) % len(prompts)] for at in range(min(responses, len(prompts)))]
            sampling = {**sides.sampling, seed: int(sides.sampling.get(seed, 0)) + number * 2**16}
            asked = ToSample(prompts=some, responses=responses, max_tokens=max_tokens, sampling=sampling)
            samples.append(engine.sample(asked))
        rung("engine's blocks")
        return sides, samples, hidden_states(engine, samples[-1]), notes
    finally:
        engine.shutdown()
