"""Faults that are planted in a real engine, or in what it is asked, and what the doctor has to call them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.doctor.examining import examine
from mismatch_ext.adapters.doctor.sides import DoctorsEngine, Run
from safetensors.torch import load_file, save_file

from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from examples.arithmetic.tokenizer import EOS_ID, encode
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

    expected: tuple[str, ...] = ()
    near: tuple[float, float] | None = None
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


def _sampled(**sampling: Any) -> dict[str, Any]:
    return {"sampling": {"seed": 0} | sampling}


def _started(**arguments: Any) -> dict[str, Any]:
    return {"arguments": arguments}


def _rope(**changes: Any) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        config["rope_parameters"] |= changes

    return edit


def _epsilon(factor: float) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        config["rms_norm_eps"] *= factor

    return edit


def _set(**changes: Any) -> Edit:
    return lambda config: config.update(changes)


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


def exchanged(first: str, second: str) -> Callable[[Tensors], None]:
    """Exchange tensors that differ in a part of their names."""

    def edit(weights: Tensors) -> None:
        for name in [name for name in weights if first in name]:
            other = name.replace(first, second)
            weights[name], weights[other] = weights[other], weights[name]

    return edit


def _rounded(rounded: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """Leave what quantization leaves of linear layers and experts."""

    def edit(weights: Tensors) -> None:
        for name, weight in weights.items():
            if name.endswith("_proj.weight"):
                weights[name] = rounded(weight)

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


BOTH16 = {"dtype": "float16", "trainer_dtype": "float16"}
BOTH32 = {"dtype": "float32", "trainer_dtype": "float32"}
EXACT_HEAD = {"head_dtype": "float32"}
COOLED = {"temperature": 0.7} | _sampled(temperature=0.7)
THETA = 10_000.0
CLEAN = {
    "clean": Planted(),
    "clean, another seed": Planted(run=_sampled(seed=7)),
    "clean, a third seed": Planted(run=_sampled(seed=11)),
    "clean, short": Planted(run=_sampled(seed=3), tokens=24),
    "clean, temperature 0.7": Planted(run=COOLED),
    "clean, float16": Planted(run=BOTH16),
    "clean, float16, another seed": Planted(run=BOTH16 | _sampled(seed=5)),
    "clean, float32": Planted(run=BOTH32),
    "clean, heads in float32": Planted(run={"head": "float32"} | _started(hf_overrides=EXACT_HEAD)),
}
CLEAN_EXPERTS = {f"{name}, experts": replace(CLEAN[name], kind="moe") for name in
             ("clean", "clean, another seed", "clean, temperature 0.7", "clean, float16", "clean, float32")}  # fmt: skip
REQUESTS = {
    "temperature 0.94, trainer 1": Planted(
        expected=("temperature",), near=(0.93, 0.95), run=_sampled(temperature=0.94)
    ),
    "top_p 0.88": Planted(expected=("top_p",), near=(0.86, 0.9), run=_sampled(top_p=0.88)),
    "top_k 4": Planted(expected=("top_k",), near=(4, 4), run=_sampled(top_k=4)),
    "min_p 0.07": Planted(expected=("min_p",), near=(0.05, 0.09), run=_sampled(min_p=0.07)),
    "repetition_penalty 1.07": Planted(
        expected=("repetition_penalty",), near=(1.06, 1.08), run=_sampled(repetition_penalty=1.07)
    ),
    "frequency_penalty 0.27": Planted(
        expected=("frequency_penalty",), near=(0.25, 0.29), run=_sampled(frequency_penalty=0.27)
    ),
    "logit_bias of 0.6": Planted(
        expected=("logit_bias",), near=(1.7, 1.95), run=_sampled(logit_bias={7: 0.6}), said="token 7"
    ),
}
PROMPT = {
    "an extra token first": Planted(expected=("extra_token",), seen=lambda ids: [EOS_ID, *ids]),
    "a prompt's first token twice": Planted(expected=("extra_token",), seen=lambda ids: [ids[0], *ids], said="twice"),
    "a prompt without its first 2 tokens": Planted(expected=("missing_first",), near=(2, 2), seen=lambda ids: ids[2:]),
    "a prompt without its last token": Planted(expected=("missing_last",), near=(1, 1), seen=lambda ids: ids[:-1]),
}
HIDDEN = {
    "top_p 0.9, raw log-probabilities": Planted(
        expected=("top_p",), run=_sampled(top_p=0.9) | _started(logprobs_mode="raw_logprobs")
    ),
    "temperature 0.8 both, raw log-probabilities": Planted(
        expected=("raw_logprobs",),
        run={"temperature": 0.8} | _sampled(temperature=0.8) | _started(logprobs_mode="raw_logprobs"),
    ),
}
CONFIG = {
    "rope_theta x 1.13": Planted(expected=("rope_theta",), near=(1.1, 1.16), config=_rope(rope_theta=1.13 * THETA)),
    "rope_theta x 0.87, float16": Planted(
        expected=("rope_theta",), near=(0.86, 0.88), config=_rope(rope_theta=0.87 * THETA), run=BOTH16
    ),
    "positions at four fifths": Planted(
        expected=("rope_scale",), near=(0.79, 0.81), config=_rope(rope_type="linear", factor=1.25)
    ),
    "YaRN x 3": Planted(
        expected=("rope_yarn",),
        near=(2.8, 3.2),
        config=_rope(rope_type="yarn", factor=3.0, original_max_position_embeddings=512),
        run=BOTH16,
    ),
    "half of each head rotated": Planted(
        expected=("partial_rotary",), near=(0.5, 0.5), config=_rope(partial_rotary_factor=0.5)
    ),
    "norm epsilon x 270": Planted(expected=("norm_eps",), near=(200, 370), config=_epsilon(270)),
    "norm epsilon x 43, float16": Planted(expected=("norm_eps",), near=(36, 52), config=_epsilon(43), run=BOTH16),
    "attention's scale x 1.06, float32": Planted(
        expected=("attention_scale",), near=(1.055, 1.065), weights=_scaled("q_norm.weight", 1.06), run=BOTH32
    ),
    "the trainer's rope_theta x 1.09": Planted(
        expected=("rope_theta",),
        near=(1 / 1.12, 1 / 1.06),
        config=_rope(rope_theta=1.09 * THETA),
        trainers=True,
        said="10900",
    ),
}
WEIGHTS = {
    "fp8 KV cache": Planted(expected=("kv_fp8_truncated",), run=_started(kv_cache_dtype="fp8_e4m3"), said="e4m3"),
    "fp8 KV cache, e5m2": Planted(expected=("kv_fp8_truncated",), run=_started(kv_cache_dtype="fp8_e5m2"), said="e5m2"),
    "fp8 weights": Planted(expected=("weights_fp8",), weights=_rounded(_fp8)),
    "int8 weights, float16": Planted(expected=("weights_int8",), weights=_rounded(_int8), run=BOTH16),
    "4-bit weights, groups of 32": Planted(expected=("weights_int4",), near=(32, 32), weights=_rounded(_int4)),
    # With both tensors in the checkpoint vLLM does not believe its configuration.
    "a head that is the embedding": Planted(
        expected=("head_tied",), config=_set(tie_word_embeddings=True), weights=_lacking("lm_head.weight")
    ),
    "the last of three older checkpoints": Planted(
        expected=("stale_weights",), older=(moved(seed=1), moved(seed=2), moved()), said="older2"
    ),
    "older weights in layer 2": Planted(
        expected=("stale_layer",),
        near=(2, 2),
        older=(moved(seed=1), moved(by=4e-3)),
        kept=".layers.2.",
        said="older1",
    ),
    "the engine's head in float32": Planted(
        expected=("head_dtype",), run=_started(hf_overrides=EXACT_HEAD), said="the engine's head"
    ),
    "the trainer's head in float32": Planted(
        expected=("head_dtype",), run={"head": "float32"}, said="the trainer's head"
    ),
    "engine float16, trainer bfloat16": Planted(expected=("trainer_dtype",), run={"dtype": "float16"}),
}
TWO = {
    "temperature 0.96 and fp8 weights": Planted(
        expected=("temperature", "weights_fp8"),
        near=(0.95, 0.97),
        run=_sampled(temperature=0.96),
        weights=_rounded(_fp8),
    ),
    "top_p 0.92 and rope_theta x 1.12": Planted(
        expected=("top_p", "rope_theta"),
        near=(0.9, 0.94),
        run=_sampled(top_p=0.92),
        config=_rope(rope_theta=1.12 * THETA),
    ),
}
EXPERTS = {
    "chosen experts not normalized": Planted(expected=("expert_norm",), config=_set(norm_topk_prob=False)),
    "experts x 1.08": Planted(expected=("expert_scale",), near=(1.05, 1.11), weights=_scaled("down_proj.weight", 1.08)),
    "rope_theta x 1.13, experts": Planted(
        expected=("rope_theta",), near=(1.1, 1.16), config=_rope(rope_theta=1.13 * THETA)
    ),
    "older weights, float16, experts": Planted(expected=("stale_weights",), older=(moved(),), run=BOTH16),
    "top_p 0.91, experts": Planted(expected=("top_p",), near=(0.89, 0.93), run=_sampled(top_p=0.91)),
    "fp8 KV cache, experts": Planted(expected=("kv_fp8_truncated",), run=_started(kv_cache_dtype="fp8_e4m3")),
    "norm epsilon x 38, float32, experts": Planted(
        expected=("norm_eps",), near=(37, 39), config=_epsilon(38), run=BOTH32
    ),
}
EXPERTS = {name: replace(planted, kind="moe") for name, planted in EXPERTS.items()}

# Tried when the doctor was done, to see what it says of faults that nobody had in mind.
LATER = {
    "presence_penalty 0.4": Planted(
        expected=("presence_penalty",), near=(0.38, 0.42), run=_sampled(presence_penalty=0.4)
    ),
    "min_tokens 20": Planted(expected=("min_tokens",), near=(20, 20), run=_sampled(min_tokens=20)),
    "top_k 6 and top_p 0.85": Planted(expected=("top_p", "top_k"), run=_sampled(top_p=0.85, top_k=6)),
    "two biases": Planted(expected=("logit_bias", "logit_bias"), run=_sampled(logit_bias={7: 0.8, 9: -0.8})),
    "the trainer's temperature 0.9": Planted(
        expected=("temperature",), near=(0.99, 1.01), run={"temperature": 0.9} | _sampled(temperature=1.0)
    ),
    "a sliding window of 24": Planted(
        expected=("sliding_window",),
        near=(24, 24),
        config=_set(
            use_sliding_window=True, sliding_window=24, max_window_layers=0, layer_types=["sliding_attention"] * 4
        ),
    ),
    "older weights and temperature 0.95": Planted(
        expected=("temperature", "stale_weights"), near=(0.94, 0.96), older=(moved(),), run=_sampled(temperature=0.95)
    ),
    "one expert for each token": Planted(
        kind="moe", expected=("experts_per_token",), near=(1, 1), config=_set(num_experts_per_tok=1)
    ),
}
UNKNOWN = Planted(weights=moved("layers.1.mlp.down_proj", by=0.02, seed=3))


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


def some(runs: Mapping[str, Planted], *names: str) -> dict[str, Planted]:
    """Return runs by their names."""
    return {name: runs[name] for name in names}


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
