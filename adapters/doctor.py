"""`mismatch-ext doctor`: sample with the engine, score with the trainer, name what makes them differ, and try the remedy."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_ext.cli import folder
from mismatch_ext.errors import ConfigError, MismatchError, RecordError, RunDirectoryError
from mismatch_ext.strict import suggestion
from mismatch_ext.terminal import say

if TYPE_CHECKING:
    from mismatch_ext.adapters.transformers.doctor import Scorer
    from mismatch_ext.adapters.vllm.doctor import DoctorsEngine

    from mismatch_ext.doctor import Diagnosis, Sample

DTYPES = ("float32", "float16", "bfloat16")
# Settings of an engine that a remedy takes back, by the family of the cause.
MENDED = {
    "cache": ("kv_cache_dtype",),
    "config": ("hf_overrides",),
    "weights": ("quantization", "hf_overrides"),
}
# Causes that the engine's score of the same tokens as a prompt does not have: its settings then are mended already.
SAMPLED = ("sampling", "reporting", "prompt")
THRESHOLD = 1e-4


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run's two sides are started with.

    Args:
        model: Checkpoint that the trainer holds.
        engine_model: Checkpoint that the engine serves; None for the same.
        dtype: The engine's compute dtype.
        trainer_dtype: The trainer's, under autocast unless it is float32.
        temperature: What the trainer divides logits by.
        sampling: Arguments of the engine's sampling.
        arguments: Arguments of the engine.
        older: Checkpoints whose weights the engine may have kept.
    """

    model: str
    engine_model: str | None = None
    dtype: str = "bfloat16"
    trainer_dtype: str = "bfloat16"
    temperature: float = 1.0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    older: tuple[str, ...] = ()

    def engine(self, shape: Any) -> DoctorsEngine:
        """Start the engine of this run."""
        from mismatch_ext.adapters.vllm.doctor import DoctorsEngine

        return DoctorsEngine(self.engine_model or self.model, dtype=self.dtype, shape=shape, arguments=self.arguments)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("--model", metavar="PATH", required=True, type=folder, help="checkpoint that the trainer holds")
    parser.add_argument("--engine", default="vllm", choices=("vllm",), help="engine to start, in this process")
    parser.add_argument(
        "--engine-model", metavar="PATH", type=folder, help="checkpoint that the engine serves, if another"
    )
    parser.add_argument("--dtype", default="bfloat16", help="compute dtype of both sides (default: bfloat16)")
    parser.add_argument("--trainer-dtype", metavar="DTYPE", help="the trainer's, if another; under autocast")
    tokens = parser.add_mutually_exclusive_group(required=True)
    tokens.add_argument("--prompts", metavar="FILE", type=folder,
                        help='what to sample from: a prompt a line; of a .jsonl file, its "prompt" or "prompt_ids"')  # fmt: skip
    tokens.add_argument("--rollouts", metavar="FILE", type=folder,
                        help="logged rollouts (mismatch_ext.rollouts); no engine is started")  # fmt: skip
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


def run(arguments: argparse.Namespace) -> int:
    """Print the table and write doctor.json; the exit status is 0 for clean, 1 for explained, 2 for an unexplained gap."""
    from mismatch_ext.adapters.transformers.doctor import ensure_checkpoint

    from mismatch_ext.doctor import report
    from mismatch_ext.rollouts import read_rollouts

    sides = Run(
        model=str(arguments.model),
        engine_model=None if arguments.engine_model is None else str(arguments.engine_model),
        dtype=_dtype("--dtype", arguments.dtype),
        trainer_dtype=_dtype("--trainer-dtype", arguments.trainer_dtype or arguments.dtype),
        temperature=arguments.temperature,
        sampling={"temperature": arguments.temperature, "seed": arguments.seed}
        | _pairs("--sampling", arguments.sampling),
        arguments=_pairs("--engine-arg", arguments.engine_arg),
        older=tuple(map(str, arguments.older)),
    )
    _ensure_allowed(arguments)
    for option, path in (
        ("--model", sides.model),
        ("--engine-model", sides.engine_model),
        *(("--older", p) for p in sides.older),
    ):
        if path is not None:
            ensure_checkpoint(option, path)
    how = {"seed": arguments.seed, "quick": arguments.quick}
    if arguments.rollouts is not None:
        sample = read_rollouts(arguments.rollouts)
        _writable(arguments.out)
        found = examine_logged(sides, sample, **how)
    else:
        prompts = read_prompts(arguments.prompts, sides.model)
        _writable(arguments.out)
        limits = {"responses": arguments.responses, "max_tokens": arguments.max_tokens}
        found = examine(sides, prompts, **limits, **how)
    say(report(found))
    try:
        written = {"run": asdict(sides), **found.data()}
        (arguments.out / "doctor.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(
            f"--out: doctor.json cannot be written to {arguments.out}: {error.strerror or error}."
        ) from error
    say(str(arguments.out / "doctor.json"), keep="")
    return found.exit_status(arguments.threshold)


def examine(
    sides: Run,
    prompts: Sequence[Sequence[int]],
    *,
    responses: int = 256,
    max_tokens: int = 128,
    seed: int = 0,
    seen: Sequence[Sequence[int]] | None = None,
    quick: bool = False,
) -> Diagnosis:
    """Start a run's engine, sample with it, and say why the trainer differs.

    Args:
        sides: The run.
        prompts: Token ids of each prompt, as the trainer has them.
        responses: How many to sample; of more prompts, the first so many.
        max_tokens: Most tokens of a response.
        seed: Of the intervals.
        seen: Token ids of each prompt as the engine gets them, where those are others.
        quick: Leave out the causes that need a forward pass each.

    Raises:
        RecordError: A token id of a prompt is beyond the model's vocabulary.
    """
    from mismatch_ext.adapters.transformers.doctor import load_model, routing_shape

    prompts, seen = prompts[:responses], None if seen is None else seen[:responses]
    model = load_model(sides.model)
    _ensure_known("--prompts", sides.model, model, prompts)
    shape = routing_shape(model)
    with _rungs() as rung:
        rung("engine")
        engine = sides.engine(shape)
        try:
            sample = engine.sample(
                prompts, responses=responses, max_tokens=max_tokens, sampling=sides.sampling, seen=seen
            )
            rung("engine again")
            again = engine.score(sample)
        finally:
            engine.shutdown()
        _ensure_known("--engine-model", sides.model, model, sample.responses)
        found, scorer = _diagnosed(sides, model, sample, rung, seed=seed, quick=quick)
        try:
            return _confirmed(found, sides, sample, again, scorer, rung)
        except MismatchError as error:
            # What was found stands without it.
            return replace(found, notes=(*found.notes, f"the remedy could not be tried: {error}"))


def examine_logged(sides: Run, sample: Sample, *, seed: int = 0, quick: bool = False) -> Diagnosis:
    """Say why the trainer differs from an engine that is gone, by what it logged; no remedy can be tried.

    Args:
        sides: The run; of the engine only the dtype counts.
        sample: What was logged.
        seed: Of the intervals.
        quick: Leave out the causes that need a forward pass each.

    Raises:
        RecordError: A token id is beyond the model's vocabulary.
    """
    from mismatch_ext.adapters.transformers.doctor import load_model

    model = load_model(sides.model)
    _ensure_known("--rollouts", sides.model, model, (*sample.prompts, *sample.responses))
    with _rungs() as rung:
        return _diagnosed(sides, model, sample, rung, seed=seed, quick=quick)[0]


def _ensure_known(option: str, path: str, model: Any, rows: Sequence[Sequence[int]]) -> None:
    from mismatch_ext.adapters.transformers.scoring import logits_width

    width = logits_width(model)
    largest = max(max(row) for row in rows)
    if width is not None and largest >= width:
        raise RecordError(
            f"{option}: token id {largest} is beyond the vocabulary of {path}, {width} tokens; give the model that was trained."
        )


@contextmanager
def _rungs() -> Iterator[Callable[[str], None]]:
    """Yield what moves a progress bar on, by the name of what is tried next."""
    from tqdm import tqdm

    with tqdm(unit="rung", disable=None) as bar:

        def rung(name: str) -> None:
            bar.set_description(name)
            bar.update()

        yield rung


def _diagnosed(
    sides: Run, model: Any, sample: Sample, rung: Callable[[str], None], *, seed: int, quick: bool
) -> tuple[Diagnosis, Scorer]:
    from mismatch_ext.adapters.transformers.doctor import Scorer
    from mismatch_ext.adapters.transformers.doctor_causes import of_model

    from mismatch_ext.doctor import diagnose

    rung("trainer")
    scorer = Scorer(
        model, sample, trainer_dtype=sides.trainer_dtype, engine_dtype=sides.dtype, temperature=sides.temperature
    )
    causes = [] if quick else of_model(scorer, sides.older)
    return diagnose(sample, scorer.scores, causes, seed=seed, progress=rung), scorer


def _confirmed(found: Diagnosis, sides: Run, sample: Sample, again: Sample, scorer: Scorer, rung: Any) -> Diagnosis:
    """Return the diagnosis after the remedies of the named causes were tried together on the same tokens."""
    from mismatch_ext.doctor import rescored

    families = {cause.family for cause in found.mendable if cause.family in (*SAMPLED, *MENDED)}
    if not families:
        return found
    rung("remedy")
    if families & set(MENDED):
        taken = {key for family in families for key in MENDED.get(family, ())}
        kept = {key: value for key, value in sides.arguments.items() if key not in taken}
        # The trainer's own checkpoint, in the run's dtype.
        engine = Run(model=sides.model, dtype=sides.dtype, arguments=kept).engine(scorer.shape)
        try:
            again = engine.score(sample)
        finally:
            engine.shutdown()
    left, after = rescored(again, scorer.rescored(again))
    return found.confirmed(families, left, after)


def read_prompts(path: Path, model: str) -> list[list[int]]:
    """Read prompts from a file and encode them with the checkpoint's tokenizer.

    Raises:
        ConfigError: There is no such file, no prompt in it, or a line that is no prompt; names the line.
    """
    from transformers import AutoTokenizer

    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(texts, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts: {path} holds no prompt; write one a line.")
    found: list[Any] = [line for _, line in numbered]
    if path.suffix == ".jsonl":
        found = [_of_json(line, f"{path}, line {number}") for number, line in numbered]
    if all(isinstance(prompt, list) for prompt in found):
        return found
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: {model} has no tokenizer for the prompts: {str(error).splitlines()[0]}") from error
    return [prompt if isinstance(prompt, list) else list(tokenizer.encode(prompt)) for prompt in found]


def _of_json(line: str, where: str) -> str | list[int]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--prompts: {where} is no JSON: {error}") from error
    ids = row.get("prompt_ids") if isinstance(row, dict) else None
    if isinstance(ids, list) and ids and all(type(token) is int and token >= 0 for token in ids):
        return ids
    text = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text:
        raise ConfigError(f'--prompts: {where} has neither "prompt", a text, nor "prompt_ids", a list of token ids.')
    return text


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
    if arguments.rollouts is None:
        return
    for option, given in (
        ("--engine-model", arguments.engine_model),
        ("--engine-arg", arguments.engine_arg),
        ("--sampling", arguments.sampling),
    ):
        if given:
            raise ConfigError(
                f"{option} is for an engine that the doctor starts; with --rollouts it starts none: leave it out."
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


def _writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"--out: {out} cannot be written: {error.strerror or error}.") from error
