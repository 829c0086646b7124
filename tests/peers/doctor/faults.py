"""Faults that are planted in a real engine, or in what it is asked, and what the doctor has to call them."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.doctor.examining import examine
from mismatch_ext.adapters.doctor.sides import DoctorsEngine, Run
from safetensors.torch import load_file, save_file

from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from examples.arithmetic.tokenizer import encode
from mismatch_ext.doctor import Diagnosis
from mismatch_ext.routing import RoutingShape
from tests.cpu import has_fp8_cache

PROMPTS, RESPONSES, MAX_TOKENS = 192, 192, 112
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
Edit = Callable[[dict[str, Any]], None]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One run of the confusion table.

    Args:
        expected: Keys that have to be named, the first of them first; none for a clean run.
        near: Allowed values of the first one's parameter; None where it has none.
        kind: "dense" or "moe", the shipped model.
        run: Fields of the `Run`, without models.
        config: Edits the configuration that the engine reads.
        weights: Edits the weights that the engine reads.
        older: Edits of weights that the trainer's side is told of; the last one is what the engine serves.
        kept: Part of the names of the tensors that the engine kept of it; the others are the trainer's.
        seen: Changes each prompt on its way to the engine.
        trainers: The edited checkpoint is the trainer's, and the engine serves the shipped one.
        said: What the sentence of the first name has to hold.
        tokens: Most tokens of a response.
    """

    expected: Sequence[str] = ()
    near: Sequence[float] | None = None
    kind: str = "dense"
    run: Mapping[str, Any] = field(default_factory=dict)
    config: Edit | None = None
    weights: Callable[[Tensors], None] | None = None
    older: tuple[Callable[[Tensors], None], ...] = ()
    kept: str = ""
    seen: Callable[[list[int]], list[int]] | None = None
    trainers: bool = False
    said: str = ""
    tokens: int = MAX_TOKENS


def merged(changes: dict[str, Any]) -> Edit:
    """Merge changes into a configuration, and into the tables that it has."""

    def edit(config: dict[str, Any]) -> None:
        for name, value in changes.items():
            if isinstance(value, dict):
                config[name] |= value
            else:
                config[name] = value

    return edit


def moved(only: str = "", by: float = 1e-3, seed: int = 0) -> Callable[[Tensors], None]:
    """Move weights about as far as a step of training at a rate of 1e-3 does: a fifth of it is below bfloat16's rounding."""

    def edit(weights: Tensors) -> None:
        made = torch.Generator().manual_seed(seed)
        for name in sorted(weights):
            step = torch.randn(weights[name].shape, generator=made)
            if only in name:
                weights[name] += by * step

    return edit


def _scaled(name: str, factor: float) -> Callable[[Tensors], None]:
    """Scale the weights whose names end so."""

    def edit(weights: Tensors) -> None:
        for found in weights:
            if found.endswith(name):
                weights[found] *= factor

    return edit


def _keeping(older: str, part: str) -> Callable[[Tensors], None]:
    """Keep another checkpoint's tensors whose names have a part."""

    def edit(weights: Tensors) -> None:
        theirs = load_file(Path(older) / "model.safetensors")
        weights.update({name: theirs[name] for name in weights if part in name})

    return edit


def _lacking(name: str) -> Callable[[Tensors], None]:
    """Leave a tensor out."""

    def edit(weights: Tensors) -> None:
        del weights[name]

    return edit


def _fp8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def _int4(weight: torch.Tensor) -> torch.Tensor:
    groups = weight.view(-1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    return ((groups / scale).round() * scale).view(weight.shape)


def _int8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(-1, keepdim=True) / 127
    return (weight / scale).round() * scale


ROUNDED = {"fp8": _fp8, "int4": _int4, "int8": _int8}


def _rounded(to: str) -> Callable[[Tensors], None]:
    """Leave what quantization leaves of linear layers and experts."""

    def edit(weights: Tensors) -> None:
        for name, weight in weights.items():
            if name.endswith("_proj.weight"):
                weights[name] = ROUNDED[to](weight)

    return edit


EDITS = {"moved": moved, "scaled": _scaled, "lacking": _lacking, "rounded": _rounded}


def _edit(row: dict[str, Any]) -> Callable[[Tensors], None]:
    """Return the edit of weights that a row names."""
    arguments = dict(row)
    edit = EDITS[arguments.pop("edit")]
    return edit(**arguments)


def prompts_changed(row: dict[str, Any]) -> Callable[[list[int]], list[int]]:
    """Return what the engine is asked in the place of a prompt."""

    def change(ids: list[int]) -> list[int]:
        front = [*row.get("front", ()), *ids[: row.get("twice", 0)]]
        return [*front, *ids[row.get("skip", 0) : len(ids) - row.get("cut", 0)]]

    return change


def _read(row: dict[str, Any]) -> Planted:
    """Return a fault from its row in faults.toml."""
    fields = dict(row)
    for name, read in (("config", merged), ("weights", _edit), ("seen", prompts_changed)):
        if name in fields:
            fields[name] = read(fields[name])
    fields["older"] = tuple(map(_edit, row.get("older", ())))
    sampling = row.get("run", {}).get("sampling", {})
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    return Planted(**fields)


_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
GROUPS = {group: {name: _read(row) for name, row in rows.items()} for group, rows in _ROWS.items()}
CLEAN, REQUESTS, PROMPT, HIDDEN = (GROUPS[name] for name in ("CLEAN", "REQUESTS", "PROMPT", "HIDDEN"))
CONFIG, WEIGHTS, EXPERTS = (GROUPS[name] for name in ("CONFIG", "WEIGHTS", "EXPERTS"))


class Engines:
    """Keeps the engine of a run for the next one, where that would start the same."""

    def __init__(self) -> None:
        self._key: Any = None
        self._engine: DoctorsEngine | None = None
        self._shutdown: Callable[[], None] = lambda: None

    def start(self, run: Run, shape: RoutingShape | None, lengths: Sequence[int]) -> DoctorsEngine:
        """Return a run's engine; what was started for another is ended first."""
        key = (run.engine_model or run.model, run.dtype, repr(sorted(run.arguments.items())), shape is None)
        if key != self._key:
            self.end()
            engine: Any = Run.start(run, shape, lengths)
            self._engine, self._shutdown, self._key = engine, engine.shutdown, key
            # Whoever borrows it does not end it.
            engine.shutdown = lambda: None
        assert self._engine is not None
        return self._engine

    def end(self) -> None:
        """End what runs."""
        if self._engine is not None:
            self._shutdown()
        self._engine = self._key = None


@dataclass(frozen=True, kw_only=True)
class LentRun(Run):
    """A run whose engines are lent."""

    engines: Engines = field(default_factory=Engines)

    def start(self, shape: RoutingShape | None, lengths: Sequence[int] = ()) -> DoctorsEngine:
        """Borrow the run's engine."""
        return self.engines.start(self, shape, lengths)


def edited(source: Path, target: Path, config: Edit | None, weights: Callable[[Tensors], None] | None) -> str:
    """Copy a checkpoint with another configuration or other weights, and return its folder."""
    shutil.copytree(source, target)
    if config:
        found = json.loads((target / "config.json").read_text(encoding="utf-8"))
        config(found)
        (target / "config.json").write_text(json.dumps(found), encoding="utf-8")
    if weights:
        tensors = {name: tensor.clone() for name, tensor in load_file(target / "model.safetensors").items()}
        weights(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


Ids = list[list[int]]


def plant(planted: Planted, folder: Path, engines: Engines) -> tuple[Run, Ids, Ids | None]:
    """Plant a fault, and return the run that has it, its prompts, and those that its engine gets where they are others.

    Args:
        planted: The fault.
        folder: For checkpoints, where others than the shipped one are needed.
        engines: What runs already.
    """
    own, served = str(FOLDER / planted.kind), None
    if planted.config or planted.weights:
        served = edited(FOLDER / planted.kind, folder / "served", planted.config, planted.weights)
    older = tuple(
        edited(FOLDER / planted.kind, folder / f"older{number}", None, edit)
        for number, edit in enumerate(planted.older)
    )
    served = older[-1] if older else served
    if planted.kept:
        served = edited(FOLDER / planted.kind, folder / "served", None, _keeping(older[-1], planted.kept))
    if planted.trainers:
        own, served = str(served), own
    settings = dict(planted.run)
    longest = {"context_length" if settings.get("engine") == "sglang" else "max_model_len": 256}
    arguments = {**longest, **settings.pop("arguments", {})}
    run = LentRun(model=own, engine_model=served, arguments=arguments, older=older, engines=engines, **settings)
    prompts = [encode(row["prompt"]) for row in make_dataset(PROMPTS, seed=5000)]
    seen = None if planted.seen is None else [planted.seen(ids) for ids in prompts]
    return run, prompts, seen


def cannot(planted: Planted) -> str:
    """Return why a fault cannot be planted on this CPU; nothing where it can."""
    cache = str(planted.run.get("arguments", {}).get("kv_cache_dtype", ""))
    if cache.startswith("fp8") and not has_fp8_cache():
        # `tests/peers/test_upstream.py` holds vLLM to this refusal on such a CPU.
        return "not planted: vLLM has no fp8 KV cache on a CPU without AVX-512"
    return ""


def examined(planted: Planted, folder: Path, engines: Engines) -> Diagnosis:
    """Plant a fault, and have the doctor look."""
    run, prompts, seen = plant(planted, folder, engines)
    return examine(run, prompts, responses=RESPONSES, max_tokens=planted.tokens, seen=seen)


def wrong(planted: Planted, found: Diagnosis) -> str:
    """Return what is wrong with the names; nothing where the first is the one planted, with its parameter, and all are given.

    Where two were planted, the first of either and what is left by it are enough.
    """
    named = [cause.key for cause in found.causes]
    if not planted.expected:
        return f"names {named} on a clean run" if named or found.verdict != "clean" else ""
    if not named or named[0] not in planted.expected:
        return f"names {named}, not {planted.expected}"
    if any(name not in planted.expected for name in named) or (
        len(named) < len(planted.expected) and found.verdict != "partly"
    ):
        return f"names {named}, {found.verdict}, not {planted.expected}"
    first = found.causes[0]
    low, high = planted.near or (-torch.inf, torch.inf)
    if named[0] == planted.expected[0] and not low <= first.parameter <= high:
        return f"{first.said}: {first.parameter} is not within {planted.near}"
    return "" if planted.said in first.said else f"{first.said!r} does not hold {planted.said!r}"


def table(runs: Mapping[str, Planted], folder: Path) -> dict[str, str]:
    """Return what each fault was called, how much its remedy was to take and took, and hold that the names are right."""
    found, mistakes, engines = {}, [], Engines()
    try:
        for number, (name, planted) in enumerate(runs.items()):
            if reason := cannot(planted):
                found[name] = reason
                continue
            (folder / str(number)).mkdir()
            seen = examined(planted, folder / str(number), engines)
            found[name] = "; ".join(said(seen))
            mistakes += [
                f"{name}: {mistake}: {found[name]}" for mistake in (wrong(planted, seen), unsound(seen)) if mistake
            ]
    finally:
        engines.end()
    assert not mistakes, "\n".join(mistakes)
    return found


def said(found: Diagnosis) -> Iterator[str]:
    """Yield what a diagnosis says, name by name."""
    for cause in found.causes:
        share = "" if cause.share is None else f", {cause.share:.0%}"
        # Without the folders that a checkpoint of a test lies in, and what the configurations say.
        yield f"{re.sub(r'/[^ ]*/', '', cause.said).partition(' (')[0]} ({cause.status}{share})"
    yield from () if found.causes else ("nothing is named",)
    for mended in found.mended:
        yield f"to fall by {mended.predicted:.0%}, fell by {mended.measured:.0%}"
    yield f"left {found.left:.2f}, {found.verdict}"


def unsound(found: Diagnosis) -> str:
    """Return what is wrong with a diagnosis' shares, or with what its remedies took; nothing where both are right."""
    shares = [part for part in found.parts if part.share is not None]
    total = sum(part.share or 0.0 for part in shares)
    if shares and abs(total - 1) > 1e-6:
        return f"shares add up to {total}"
    if shares and not sum(part.low or 0.0 for part in shares) <= 1 <= sum(part.high or 0.0 for part in shares):
        return "the gap is not within the intervals of its shares"
    tried = {key for mended in found.mended for key in mended.causes}
    refused = [cause.key for cause in found.causes if cause.key in tried and cause.status != "confirmed"]
    if refused and found.verdict == "explained":
        return f"the remedy of {refused} did not take what they predict, token by token: {found.mended}"
    return ""
