"""Faults planted into the engine, and whether the doctor names them by the tokens and log-probabilities alone."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.transformers.doctor.causes import of_model
from mismatch_ext.adapters.transformers.doctor.scorer import Scorer
from torch import nn
from transformers import TopPLogitsWarper

from benchmarks.gpu.engine import Warper, decode
from benchmarks.gpu.ladder import Fp8Cache
from benchmarks.gpu.models import SIZES, in_dtype, random_model, said_of
from benchmarks.gpu.part import Found, Say, Setting
from benchmarks.gpu.svg import Figure, Panel, Series
from mismatch_ext.doctor import diagnose
from mismatch_ext.precision.dtypes import torch_dtype

NAME, TITLE = "faults", "planted faults, named by the doctor"
THETA, EPSILON, MOVED = 1.5, 100.0, 0.05
RESPONSES, NEW = 192, 32
FEW, SHORT = 16, 12
# The doctor's table has every logit of every token: a vocabulary of a few thousand keeps it small.
VOCABULARY = 4096


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with the engine.

    Args:
        names: Keys of the causes that name it.
        temperature: What the engine divides logits by; the trainer takes 1.
        warpers: What the engine truncates by.
        config: Fields of the engine's configuration, by what the trainer's are.
        stale: Whether the engine has the weights of before.
        dtype: What the engine computes in; the trainer in bf16.
        cache: What makes the engine's KV cache.
    """

    names: tuple[str, ...] = ()
    temperature: float = 1.0
    warpers: tuple[Warper, ...] = ()
    config: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    stale: bool = False
    dtype: str = "bfloat16"
    cache: Callable[[int, int], Any] | None = None


FAULTS = {
    "none": Fault(),
    "temperature 0.9": Fault(names=("temperature",), temperature=0.9),
    "top_p 0.9": Fault(names=("top_p",), warpers=(TopPLogitsWarper(0.9),)),
    "rope theta x1.5": Fault(
        names=("rope_theta",),
        config={"rope_parameters": lambda found: {**found, "rope_theta": found["rope_theta"] * THETA}},
    ),
    "norm epsilon x100": Fault(names=("norm_eps",), config={"rms_norm_eps": lambda found: found * EPSILON}),
    "weights of before": Fault(names=("stale_weights",), stale=True),
    "FP16 engine, bf16 trainer": Fault(names=("trainer_dtype",), dtype="float16"),
    "e4m3 KV cache": Fault(names=("kv_fp8",), cache=lambda rows, tokens: Fp8Cache()),
}

# Of a quick run: the faults, and the causes that are tried.
QUICK, TRIED = ("temperature 0.9",), ("rope_theta", "norm_eps", "kv_fp8")


def run(setting: Setting, folder: Path, say: Say) -> Found:
    """Plant each fault, and examine what the engine then samples."""
    size = replace(SIZES["tiny" if setting.quick else "small"], vocabulary=256 if setting.quick else VOCABULARY)
    model = random_model("dense", size, device=setting.device, seed=setting.seed)
    before = moved(model, setting.seed)
    older = folder / "older"
    before.save_pretrained(older)  # type: ignore[operator]
    count, new = (FEW, SHORT) if setting.quick else (RESPONSES, NEW)
    chosen = QUICK if setting.quick else tuple(FAULTS)
    generator = torch.Generator().manual_seed(setting.seed + 2)
    prompts = torch.randint(size.vocabulary, (count, 8), generator=generator).to(setting.device)
    table = {}
    try:
        for number, name in enumerate(chosen):
            say(name)
            fault = FAULTS[name]
            engine = in_dtype(reconfigured(before if fault.stale else model, fault.config), torch_dtype(fault.dtype))
            sample = decode(
                engine,
                prompts,
                new,
                generator=setting.generator(300 + number),
                warpers=fault.warpers,
                temperature=fault.temperature,
                cache=fault.cache,
            ).sample()
            del engine
            scorer = Scorer(copy.deepcopy(model), sample, trainer_dtype="bfloat16", engine_dtype=fault.dtype)
            listed = of_model(scorer, [] if setting.quick else [older])
            causes = [cause for cause in listed if cause.key in TRIED] if setting.quick else listed
            found = diagnose(sample, scorer.scores, causes, seed=setting.seed)
            named = [cause.key for cause in found.causes]
            table[name] = {
                "named": bool(set(named) & set(fault.names)) if fault.names else not named,
                "causes": named,
                "said": [cause.said.replace(str(older), "before") for cause in found.causes],
                "verdict": found.verdict,
                "mean |d|": found.gap["logp_abs_diff_mean"],
                "k3": found.gap["k3_kl"],
                "left": found.left,
                "tokens": found.tokens,
            }
    finally:
        shutil.rmtree(older)
    right = sum(row["named"] for row in table.values())
    return {"model": said_of(model, "dense"), "right": right, "planted": len(chosen), "faults": table}


def moved(model: nn.Module, seed: int) -> nn.Module:
    """Return the model as it was before: every weight off by a few hundredths of its matrix's spread."""
    made = copy.deepcopy(model)
    device = next(made.parameters()).device
    generator = torch.Generator(device).manual_seed(seed + 3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator, device=device)
                parameter.add_(noise * MOVED * parameter.std())
    return made


def reconfigured(model: nn.Module, changes: Mapping[str, Callable[[Any], Any]]) -> nn.Module:
    """Return the same weights in a model of another configuration, built as transformers builds it."""
    config: Any = copy.deepcopy(model.config)
    for key, change in changes.items():
        setattr(config, key, change(getattr(config, key)))
    with torch.device(next(model.parameters()).device):
        made: nn.Module = type(model)(config)  # type: ignore[call-arg]
    made.load_state_dict(model.state_dict())
    return made.float().eval()


def figures(found: Found) -> dict[str, Figure]:
    """Draw the gap that each fault makes."""
    rows = found["faults"]
    right = [at for at, row in enumerate(rows.values()) if row["named"]]
    values = [row["mean |d|"] for row in rows.values()]
    wrong = [at for at in range(len(values)) if at not in right]
    series = [
        Series(name=name, x=places, y=[values[at] for at in places])
        for name, places in (("named, or rightly nothing", right), ("not named", wrong))
    ]
    panel = Panel(
        title="planted faults", x_title="", y_title="mean |d|, nats", series=series, log_y=True, labels=list(rows)
    )
    return {"gap": Figure(panels=[panel], caption=found["model"])}
