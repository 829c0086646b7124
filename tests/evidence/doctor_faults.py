"""Faults that are planted in a real engine, or in what it is asked, and what the doctor has to call them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.doctor import Run, examine
from safetensors.torch import load_file, save_file

from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from examples.arithmetic.tokenizer import EOS_ID, encode
from mismatch_ext.doctor import Diagnosis

PROMPTS, RESPONSES, MAX_TOKENS = 192, 192, 112
Edit = Callable[[dict[str, Any]], None]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One run of the confusion table.

    Args:
        expected: Keys of which one has to be named first; none for a clean run.
        near: Allowed values of the parameter; None where it has none.
        run: Fields of the `Run`, without models.
        config: Edits the configuration that the engine reads.
        weights: Edits the weights that the engine reads.
        seen: Changes each prompt on its way to the engine.
        older: Whether the trainer's side is told of the checkpoint with other weights that the engine serves.
    """

    expected: tuple[str, ...] = ()
    near: tuple[float, float] | None = None
    run: Mapping[str, Any] = field(default_factory=dict)
    config: Edit | None = None
    weights: Callable[[Tensors], None] | None = None
    seen: Callable[[list[int]], list[int]] | None = None
    older: bool = False


def _sampled(**sampling: Any) -> dict[str, Any]:
    return {"sampling": {"seed": 0} | sampling}


def _started(**arguments: Any) -> dict[str, Any]:
    return {"arguments": arguments}


def _theta(config: dict[str, Any]) -> None:
    config["rope_parameters"]["rope_theta"] *= 1.07


def _epsilon(factor: float) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        config["rms_norm_eps"] *= factor

    return edit


def _moved(weights: Tensors, only: str = "", by: float = 1e-3) -> None:
    """Move the weights about as far as a step of training at a rate of 1e-3 does: a fifth of it is below bfloat16's rounding."""
    made = torch.Generator().manual_seed(0)
    for name in sorted(weights):
        step = torch.randn(weights[name].shape, generator=made)
        if only in name:
            weights[name] += by * step


def _moved_layer(weights: Tensors) -> None:
    """Move one layer further: 1e-3 in one of them is below rounding."""
    _moved(weights, ".layers.2.", by=4e-3)


def _fp8(weights: Tensors) -> None:
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().max() / 448
            weights[name] = (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


BOTH16 = {"dtype": "float16", "trainer_dtype": "float16"}
BOTH32 = {"dtype": "float32", "trainer_dtype": "float32"}
FAULTS: dict[str, Planted] = {
    "clean, bfloat16": Planted(),
    "clean, bfloat16, another seed": Planted(run=_sampled(seed=7)),
    "clean, float16": Planted(run=BOTH16),
    "clean, float32": Planted(run=BOTH32),
    "temperature 0.97, trainer 1": Planted(
        expected=("temperature",), near=(0.96, 0.98), run=_sampled(temperature=0.97)
    ),
    "top_p 0.93": Planted(expected=("top_p",), near=(0.9, 0.95), run=_sampled(top_p=0.93)),
    "top_k 3": Planted(expected=("top_k",), near=(3, 3), run=_sampled(top_k=3)),
    "repetition_penalty 1.04": Planted(
        expected=("repetition_penalty",), near=(1.03, 1.05), run=_sampled(repetition_penalty=1.04)
    ),
    "top_p 0.9, raw log-probabilities": Planted(
        expected=("top_p",), run=_sampled(top_p=0.9) | _started(logprobs_mode="raw_logprobs")
    ),
    "rope_theta x 1.07": Planted(expected=("rope_theta",), near=(1.05, 1.09), config=_theta),
    "norm epsilon x 30": Planted(expected=("norm_eps",), near=(20, 45), config=_epsilon(30)),
    "norm epsilon x 300": Planted(expected=("norm_eps",), near=(200, 450), config=_epsilon(300)),
    "fp8 KV cache": Planted(expected=("kv_fp8_truncated", "kv_fp8"), run=_started(kv_cache_dtype="fp8_e4m3")),
    "fp8 weights": Planted(expected=("weights_fp8",), weights=_fp8),
    "other weights": Planted(expected=("stale_weights",), weights=_moved, older=True),
    "other weights in layer 2": Planted(expected=("stale_weights", "stale_layer"), weights=_moved_layer, older=True),
    "an extra token first": Planted(expected=("extra_token",), seen=lambda ids: [EOS_ID, *ids]),
    "a prompt without its first 2 tokens": Planted(expected=("missing_first",), near=(2, 2), seen=lambda ids: ids[2:]),
    "engine float16, trainer bfloat16": Planted(expected=("trainer_dtype",), run={"dtype": "float16"}),
}


def examined(kind: str, planted: Planted, folder: Path, responses: int = RESPONSES) -> Diagnosis:
    """Plant a fault, and have the doctor look.

    Args:
        kind: "dense" or "moe", the shipped model of the trainer.
        planted: The fault.
        folder: For the checkpoint that the engine serves, where that is another.
        responses: How many to sample.
    """
    own = FOLDER / kind
    served = None
    if planted.config or planted.weights:
        served = folder / "served"
        shutil.copytree(own, served)
        if planted.config:
            config = json.loads((served / "config.json").read_text(encoding="utf-8"))
            planted.config(config)
            (served / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if planted.weights:
            weights = {name: tensor.clone() for name, tensor in load_file(served / "model.safetensors").items()}
            planted.weights(weights)
            save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    prompts = [encode(row["prompt"]) for row in make_dataset(PROMPTS, seed=5000)]
    settings = dict(planted.run)
    arguments = {"max_model_len": 256, **settings.pop("arguments", {})}
    run = Run(
        model=str(own),
        engine_model=None if served is None else str(served),
        arguments=arguments,
        older=(str(served),) if planted.older and served else (),
        **settings,
    )
    seen = None if planted.seen is None else [planted.seen(ids) for ids in prompts]
    return examine(run, prompts[:responses], responses=responses, max_tokens=MAX_TOKENS, seen=seen and seen[:responses])


def right(planted: Planted, found: Diagnosis) -> bool:
    """Tell whether the first cause that is named is the one planted, with its parameter; for a clean run, whether none is."""
    if not planted.expected:
        return not found.causes
    if not found.causes or found.causes[0].key not in planted.expected:
        return False
    low, high = planted.near or (-torch.inf, torch.inf)
    return low <= found.causes[0].parameter <= high
