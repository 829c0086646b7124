"""The options of `mismatch-ext doctor`, and what is wrong with them before anything starts."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from mismatch_ext.adapters.doctor.server import Address
from mismatch_ext.adapters.doctor.sides import Run

from mismatch_ext.cli import folder
from mismatch_ext.errors import ConfigError
from mismatch_ext.strict import suggestion

DTYPES = ("float32", "float16", "bfloat16")
DTYPE = "bfloat16"
LAYOUTS = ("right", "left", "left-positions", "packed")
THRESHOLD = 1e-4
# Engines that are started, with their own names of the seed of sampling.
SEEDS = {"vllm": "seed", "sglang": "sampling_seed"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("--model", metavar="PATH", required=True, type=folder, help="checkpoint that the trainer holds")
    parser.add_argument("--engine", default="vllm", choices=tuple(SEEDS), help="engine to start, in this process")
    parser.add_argument(
        "--engine-model", metavar="PATH", type=folder, help="checkpoint that the engine serves, if another"
    )
    parser.add_argument("--server", metavar="URL", help="a vLLM server to ask; no engine is started")
    parser.add_argument("--server-model", metavar="NAME", help="which of the server's models, if it has several")
    parser.add_argument("--server-timeout", metavar="SECONDS", type=float, default=600.0,
                        help="how long the server may be silent within a request (default: 600)")  # fmt: skip
    parser.add_argument("--server-key", metavar="VARIABLE", help="environment variable that holds the server's API key")
    parser.add_argument("--dtype", help="compute dtype of both sides (default: what the server says, or bfloat16)")
    parser.add_argument("--trainer-dtype", metavar="DTYPE", help="the trainer's, if another; under autocast")
    parser.add_argument("--trainer-layout", default="right", choices=LAYOUTS,
                        help="how it pads; left, without position_ids, is TRL's (default: right)")  # fmt: skip
    tokens = parser.add_mutually_exclusive_group(required=True)
    tokens.add_argument("--prompts", metavar="FILE", type=folder,
                        help='what to sample from: a prompt a line; of a .jsonl file, its "prompt" or "prompt_ids"')  # fmt: skip
    tokens.add_argument("--rollouts", metavar="FILE", type=folder,
                        help="rollouts that a host logged (docs/doctor.md); no engine is started")  # fmt: skip
    parser.add_argument("--weight-version", metavar="V",
                        help="of --rollouts, those that this version of the weights sampled")  # fmt: skip
    parser.add_argument("--responses", metavar="N", type=int, default=256, help="responses to sample (default: 256)")
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, default=128, help="most tokens of a response (default: 128)"
    )
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=1.0, help="what the trainer divides logits by"
    )
    parser.add_argument("--sampling", metavar="KEY=VALUE", action="append", default=[],
                        help="what the engine samples with, such as top_p=0.9; repeatable")  # fmt: skip
    parser.add_argument("--engine-arg", metavar="KEY=VALUE", action="append", default=[],
                        help="what the engine is started with, such as kv_cache_dtype=fp8_e4m3; repeatable")  # fmt: skip
    parser.add_argument("--older", metavar="PATH", action="append", default=[], type=folder,
                        help="weights that the engine may have kept: an earlier step, an adapter's base; repeatable")  # fmt: skip
    parser.add_argument("--threshold", metavar="NATS", type=float, default=THRESHOLD,
                        help=f"mean gap per token that may stay unexplained (default: {THRESHOLD:g})")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="leave out the causes that need a forward pass each")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of intervals (default: 0)")
    parser.add_argument("--out", metavar="DIR", required=True, type=folder, help="folder for doctor.json")


def sides_of(arguments: argparse.Namespace) -> Run:
    """Return the run that options describe.

    Raises:
        ConfigError: A value is not allowed, or would be left out without a word; names the option.
    """
    sides = Run(
        model=str(arguments.model),
        engine_model=None if arguments.engine_model is None else str(arguments.engine_model),
        dtype=_dtype("--dtype", arguments.dtype or DTYPE),
        trainer_dtype=_dtype("--trainer-dtype", arguments.trainer_dtype or arguments.dtype or DTYPE),
        temperature=arguments.temperature,
        sampling={"temperature": arguments.temperature, SEEDS[arguments.engine]: arguments.seed}
        | _pairs("--sampling", arguments.sampling),
        arguments=_pairs("--engine-arg", arguments.engine_arg),
        older=tuple(map(str, arguments.older)),
        server=None
        if arguments.server is None
        else Address(
            url=arguments.server,
            model=arguments.server_model,
            timeout=arguments.server_timeout,
            key=arguments.server_key,
        ),
        engine=arguments.engine,
        layout=arguments.trainer_layout,
    )
    _ensure_allowed(arguments)
    return sides


def _ensure_allowed(arguments: argparse.Namespace) -> None:
    """Refuse values that would fail, or be left out without a word, after the engine's start."""
    if not 0 < arguments.temperature < math.inf:
        raise ConfigError(f"--temperature: {arguments.temperature} is not allowed; allowed: > 0.")
    for option, value, least in (
        ("--responses", arguments.responses, 2),
        ("--max-tokens", arguments.max_tokens, 1),
        ("--seed", arguments.seed, 0),
    ):
        if value < least:
            raise ConfigError(f"{option}: {value} is not allowed; allowed: >= {least}.")
    if not 0 < arguments.server_timeout < math.inf:
        raise ConfigError(f"--server-timeout: {arguments.server_timeout} is not allowed; allowed: > 0.")
    # The default of --engine cannot be told from the same that was given.
    other = arguments.engine != "vllm"
    started = (
        ("--engine", other), ("--engine-model", arguments.engine_model), ("--engine-arg", arguments.engine_arg)
    )  # fmt: skip
    if arguments.rollouts is not None:
        _ensure_left_out("--rollouts", (*started, ("--sampling", arguments.sampling), ("--server", arguments.server)))
        return
    if arguments.weight_version is not None:
        raise ConfigError("--weight-version chooses among --rollouts; leave it out.")
    if arguments.server is not None:
        _ensure_left_out("--server", started)


def _ensure_left_out(by: str, options: Sequence[tuple[str, Any]]) -> None:
    for option, given in options:
        if given:
            raise ConfigError(
                f"{option} is for an engine that the doctor starts or asks; with {by} it does not: leave it out."
            )


def _dtype(name: str, value: str) -> str:
    if value not in DTYPES:
        raise ConfigError(f"{name}: {value!r} is not allowed; allowed: {', '.join(DTYPES)}.{suggestion(value, DTYPES)}")
    return value


def _pairs(name: str, given: Sequence[str]) -> dict[str, Any]:
    """Return KEY=VALUE arguments; a value is JSON, or else a text."""
    found: dict[str, Any] = {}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{name}: {pair!r} is not of the form KEY=VALUE.")
        try:
            found[key] = json.loads(text)
        except json.JSONDecodeError:
            found[key] = text
    return found
