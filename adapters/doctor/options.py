"""The options of `mismatch-ext doctor`, and their checks before anything starts."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mismatch_ext.adapters.doctor.hosts import LONGEST, RESPONSES, HostRun
from mismatch_ext.adapters.doctor.server import SEEDS, Address
from mismatch_ext.adapters.doctor.sides import Run

from mismatch_ext.cli import folder
from mismatch_ext.errors import ConfigError, suggestion
from mismatch_ext.precision.dtypes import ALIASES, canonical

DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("right", "left", "left-positions", "packed")
ATTENTIONS = ("eager", "sdpa")
THRESHOLD = 1e-4
# The option that sets a field of a run, by the field.
OPTIONS = {
    **{
        name: name
        for name in ("model", "engine_model", "dtype", "trainer_dtype", "engine", "temperature", "server", "older")
    },
    **{name: f"trainer_{name}" for name in ("layout", "head", "attention")},
}
# Settings of requests by which a grammar takes tokens out, of vLLM and SGLang.
GRAMMARS = {"structured_outputs", "guided_decoding", "json_schema", "regex", "ebnf", "structural_tag"}

EPILOG = """examples:
  mismatch-ext doctor --model PATH --prompts prompts.txt --out runs/doctor
  mismatch-ext doctor --trl config.yaml --out runs/doctor
  mismatch-ext doctor --model PATH --rollouts rollouts.jsonl --out runs/doctor
  mismatch-ext doctor --turns calls.jsonl --tokenizer PATH --out runs/turns

exit status: 0 clean, 1 explained, 2 an error, 3 unexplained or not judged; docs/doctor.md has more"""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The run that one call of the doctor examines, and where its settings come from.

    Args:
        run: The two sides.
        max_tokens: Largest number of tokens of a response.
        origin: Source of each setting: an option, or a place in a host's configuration; settings at their default are left out.
        left_out: Settings of the host that are not taken over, with the reason.
    """

    run: Run
    max_tokens: int
    origin: Mapping[str, str]
    left_out: Mapping[str, str]


def configure_sides(parser: argparse.ArgumentParser, *, epilog: str) -> None:
    """Add the arguments that say what the two sides are and what is sampled; those of the gate and of the doctor alike."""
    parser.epilog, parser.formatter_class = epilog, argparse.RawDescriptionHelpFormatter
    run = parser.add_argument_group("the run")
    run.add_argument("--model", metavar="PATH", type=folder,
                     help="checkpoint of the trainer, or its adapter; with --trl or --verl, the run's own")  # fmt: skip
    hosts = run.add_mutually_exclusive_group()
    hosts.add_argument("--trl", metavar="FILE", type=folder,
                       help="configuration file of a TRL run, whose settings are taken over")  # fmt: skip
    hosts.add_argument("--verl", metavar="OVERRIDE", nargs="+",
                       help="overrides of verl's main_ppo, whose settings are taken over")  # fmt: skip
    run.add_argument(
        "--dtype", help="compute dtype of both sides (default: what the run, server or log says, or bfloat16)"
    )
    trainer = parser.add_argument_group("the trainer")
    trainer.add_argument("--trainer-dtype", metavar="DTYPE", help="its dtype, if another; under autocast")
    trainer.add_argument("--trainer-layout", choices=LAYOUTS,
                         help="how it pads; left, without position_ids, is TRL's (default: right)")  # fmt: skip
    trainer.add_argument("--trainer-head", choices=("float32",),
                         help="its head's dtype, if another: TRL's cast_lm_head_to_fp32")  # fmt: skip
    trainer.add_argument("--trainer-attention", choices=ATTENTIONS,
                         help="its attn_implementation (default: the run's, else the one that transformers takes)")  # fmt: skip
    trainer.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        help="what it divides logits by (default: the run's, else the log's, else 1)",
    )
    engine = parser.add_argument_group("the engine")
    engine.add_argument("--engine", choices=tuple(SEEDS), help="engine to start, in this process (default: vllm)")
    engine.add_argument("--engine-arg", metavar="KEY=VALUE", action="append", default=[],
                        help="what it is started with, such as kv_cache_dtype=fp8_e4m3; repeatable")  # fmt: skip
    engine.add_argument("--sampling", metavar="KEY=VALUE", action="append", default=[],
                        help="what it samples with, such as top_p=0.9; repeatable")  # fmt: skip
    engine.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        help=f"most tokens of a response (default: {LONGEST}, or the run's if fewer)",
    )
    engine.add_argument("--seed", type=int, default=0, help="of sampling and of intervals (default: 0)")


def configure_prompts(tokens: Any) -> None:
    """Add where prompts come from."""
    tokens.add_argument("--prompts", metavar="FILE", type=folder,
                        help='what to sample from: a prompt a line; of a .jsonl file, its "prompt" or "prompt_ids"')  # fmt: skip
    tokens.add_argument("--dataset", metavar="NAME_OR_PATH",
                        help='what to sample from: column "prompt" of a data set, messages by the chat template')  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the doctor."""
    configure_sides(parser, epilog=EPILOG)
    tokens = parser.add_argument_group("the tokens (one of the first three, or the run's own data set)")
    one = tokens.add_mutually_exclusive_group()
    configure_prompts(one)
    one.add_argument("--rollouts", metavar="FILE", type=folder,
                     help="rollouts that a host logged (docs/doctor.md); no engine is started")  # fmt: skip
    one.add_argument("--turns", metavar="FILE", type=folder,
                     help="conversations in a log: says where a turn does not extend the one before, and why")  # fmt: skip
    tokens.add_argument("--tokenizer", metavar="PATH", type=folder,
                        help="for --turns, the folder of the run's tokenizer (default: --model)")  # fmt: skip
    tokens.add_argument("--chat-template", metavar="FILE", type=folder,
                        help="for --turns, the run's chat template, if it is not the tokenizer's")  # fmt: skip
    tokens.add_argument("--template-arg", metavar="KEY=VALUE", action="append", default=[],
                        help="for --turns, a template's setting, such as enable_thinking=false; repeatable")  # fmt: skip
    tokens.add_argument("--weight-version", metavar="V",
                        help="of --rollouts, those that this version of the weights sampled")  # fmt: skip
    tokens.add_argument("--responses", metavar="N", type=int,
                        help=f"responses to sample (default: {RESPONSES}, fewer with --quick)")  # fmt: skip
    weights = parser.add_argument_group("the engine's weights, if they are others")
    weights.add_argument("--engine-model", metavar="PATH", type=folder,
                         help="checkpoint or adapter that the engine serves, if another")  # fmt: skip
    weights.add_argument("--older", metavar="PATH", action="append", default=[], type=folder,
                         help="weights that the engine may have kept: an earlier step or adapter; repeatable")  # fmt: skip
    server = parser.add_argument_group("a running server")
    server.add_argument("--server", metavar="URL", help="a vLLM or SGLang server to ask; no engine is started")
    server.add_argument("--server-model", metavar="NAME", help="which of the server's models, if it has several")
    server.add_argument("--server-timeout", metavar="SECONDS", type=float, default=600.0,
                        help="how long the server may be silent within a request (default: 600)")  # fmt: skip
    server.add_argument("--server-key", metavar="VARIABLE", help="environment variable that holds the server's API key")
    answer = parser.add_argument_group("the answer")
    answer.add_argument("--out", metavar="DIR", required=True, type=folder, help="folder for doctor.json")
    answer.add_argument("--json", action="store_true", help="print doctor.json instead of the table")
    answer.add_argument("--quick", action="store_true",
                        help="leave out causes that need a forward pass each; sample less of a large vocabulary")  # fmt: skip
    answer.add_argument("--threshold", metavar="NATS", type=float, default=THRESHOLD,
                        help=f"mean gap per token that may stay unexplained (default: {THRESHOLD:g})")  # fmt: skip


def ensure_no_turns(arguments: argparse.Namespace) -> None:
    """Refuse options that are read with `--turns` alone."""
    for name in ("tokenizer", "chat_template", "template_arg"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')} is for --turns, which is not given. Leave it out.")


def asked_of(arguments: argparse.Namespace, host: HostRun | None) -> Asked:
    """Return the run that options describe; an option replaces the same setting of a host's configuration.

    Raises:
        ConfigError: A value is not allowed, is missing, or would be ignored; names the option.
    """
    _ensure_allowed(arguments, host)
    given = _given(arguments)
    origin_of_given = {name: f"--{OPTIONS[name].replace('_', '-')}" for name in given}
    engine_arguments = pairs("--engine-arg", arguments.engine_arg)
    if "dtype" in engine_arguments:
        # The engine's dtype is also what rounding is judged in, so there is only one.
        given["dtype"] = _engine_dtype(engine_arguments.pop("dtype"), given.get("dtype"))
        origin_of_given.setdefault("dtype", "--engine-arg")
    asked = (
        Run(**{"model": "", "sampling": {"temperature": 1.0}} | given)
        if host is None
        else Run(**{**host.sides, **given})
    )
    if host is None and "dtype" in given and arguments.trainer_dtype is None:
        asked = replace(asked, trainer_dtype=asked.dtype)
    if host is not None and asked.engine != host.sides.get("engine", "vllm") and arguments.server is None:
        raise ConfigError(
            f"--engine: {asked.engine}, and the run's settings are of {host.sides.get('engine', 'vllm')}; leave it out."
        )
    sampling = pairs("--sampling", arguments.sampling)
    heat = {} if arguments.temperature is None else {"temperature": arguments.temperature}
    # The name of the seed depends on the kind of server, which is not known before it is asked.
    seed = {} if arguments.server is not None else {SEEDS[asked.engine]: arguments.seed}
    asked = replace(
        asked,
        sampling={**asked.sampling, **heat, **seed, **sampling},
        arguments={**asked.arguments, **engine_arguments},
    )
    for name in GRAMMARS & set(asked.sampling):
        raise ConfigError(
            f"--sampling: {name} restricts the engine's tokens, and the gap is then the log of the mass that it allows, whatever "
            "else differs; leave it out."
        )
    origin = {} if host is None else dict(host.origin)
    if asked.server is not None:
        # The server was started with arguments of its own.
        asked = replace(asked, arguments={})
        origin = {name: where for name, where in origin.items() if not name.startswith("arguments.")}
    origin |= origin_of_given
    origin |= {"sampling.temperature": "--temperature"} if heat else {}
    origin |= {f"sampling.{name}": "--sampling" for name in sampling} | {
        f"arguments.{name}": "--engine-arg" for name in engine_arguments
    }
    longest = LONGEST if host is None else min(host.max_tokens, LONGEST)
    if host is not None and host.max_tokens > LONGEST:
        origin["max_tokens"] += f", cut to {LONGEST}: --max-tokens keeps more, and their logits in memory"
    if arguments.max_tokens is not None:
        longest, origin["max_tokens"] = arguments.max_tokens, "--max-tokens"
    return Asked(run=asked, max_tokens=longest, origin=origin, left_out={} if host is None else host.left_out)


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a run that options set directly."""
    named = {field: getattr(arguments, option) for field, option in OPTIONS.items()}
    fields = {field: value for field, value in named.items() if value not in (None, [])}
    for name in ("model", "engine_model"):
        if name in fields:
            fields[name] = str(fields[name])
    for name in ("dtype", "trainer_dtype"):
        if name in fields:
            fields[name] = _dtype(f"--{name.replace('_', '-')}", fields[name])
    if "older" in fields:
        fields["older"] = tuple(map(str, fields["older"]))
    if "server" in fields:
        fields["server"] = Address(
            url=arguments.server,
            model=arguments.server_model,
            timeout=arguments.server_timeout,
            key=arguments.server_key,
        )
    return fields


def _ensure_allowed(arguments: argparse.Namespace, host: HostRun | None) -> None:
    """Refuse values that would fail or be ignored once the engine has started."""
    if host is None and arguments.model is None:
        if arguments.rollouts is None:
            raise ConfigError(
                "--model is missing: give the checkpoint that the trainer holds, or the run by --trl or --verl."
            )
        for option in OPTIONS.values():
            # What starts or asks an engine is refused by its own sentence below.
            if option not in ("engine", "engine_model", "server") and getattr(arguments, option):
                raise ConfigError(f"--{option.replace('_', '-')} needs --model: without it only the log is read.")
    if arguments.prompts is None and arguments.rollouts is None and arguments.dataset is None:
        if host is None:
            raise ConfigError("no tokens: give --prompts or --dataset, or to the doctor --rollouts.")
        if host.dataset is None:
            raise ConfigError(
                "the run's configuration names no data set (dataset_name, data.train_files): its script brings one; give "
                "--prompts or --dataset."
            )
    if arguments.temperature is not None and not 0 < arguments.temperature < math.inf:
        raise ConfigError(f"--temperature: {arguments.temperature} is not allowed; allowed: > 0.")
    for option, value, least in (
        ("--responses", 2 if arguments.responses is None else arguments.responses, 2),
        ("--max-tokens", 1 if arguments.max_tokens is None else arguments.max_tokens, 1),
        ("--seed", arguments.seed, 0),
    ):
        if value < least:
            raise ConfigError(f"{option}: {value} is not allowed; allowed: >= {least}.")
    if not 0 < arguments.server_timeout < math.inf:
        raise ConfigError(f"--server-timeout: {arguments.server_timeout} is not allowed; allowed: > 0.")
    # `--engine vllm` only names the default, and is not refused.
    other = arguments.engine not in (None, "vllm")
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


def _engine_dtype(value: Any, stated: str | None) -> str:
    """Return the dtype that an argument of the engine names, which must not contradict `--dtype`."""
    if not isinstance(value, str) or value not in ALIASES:
        raise ConfigError(
            f"--engine-arg dtype: {value!r} is not allowed; allowed: {', '.join(DTYPES)}. Give the dtype that the engine is to "
            "compute in."
        )
    dtype = canonical(value)
    if stated not in (None, dtype):
        raise ConfigError(
            f"--dtype says {stated} and --engine-arg dtype={value}: an engine has one dtype. Leave one of them out, and give the "
            "trainer's by --trainer-dtype if it is another."
        )
    return dtype


def pairs(name: str, given: Sequence[str]) -> dict[str, Any]:
    """Return KEY=VALUE arguments; a value that is not JSON is a text."""
    values: dict[str, Any] = {}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{name}: {pair!r} is not of the form KEY=VALUE.")
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError:
            values[key] = text
    return values
