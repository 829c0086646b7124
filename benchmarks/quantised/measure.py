"""The gap of one format on real vLLM: its size and tail, its causes, and what a correction leaves of it."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.transformers.doctor import Scorer, load_model
from mismatch_ext.adapters.transformers.doctor_changes import Cached, RoundedInputs, weights
from mismatch_ext.adapters.transformers.doctor_quantised import linear_layers, quantised
from mismatch_ext.adapters.vllm.doctor import VllmEngine
from numpy.typing import NDArray
from torch import nn

from benchmarks.quantised.formats import Format, Round, served
from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from examples.arithmetic.tokenizer import encode
from mismatch_ext.config import CorrectionConfig
from mismatch_ext.correction import advise, correct
from mismatch_ext.doctor import Sample
from mismatch_ext.errors import MismatchError
from mismatch_ext.metrics import bootstrap_ratio

RESPONSES, TOKENS, KEEP = 192, 112, 0.99
Floats = NDArray[np.float64]


def measured(form: Format) -> dict[str, Any]:
    """Return the figures of a format, or `{"refused": why}` where this vLLM does not run it on this machine."""
    own = FOLDER / "dense"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = served(form, own, Path(folder) / "served")
        given = {"max_model_len": 256} | dict(form.arguments)
        try:
            sample = _sampled(str(checkpoint), form, given)
        except (MismatchError, AttributeError) as error:  # the latter where a CPU's build has no kernel
            return {"refused": _reason(error)}
    if sample is None:
        return {"refused": "starts, and leaves all layers of a dense model in bfloat16"}
    return figures(form, sample, own)


def _sampled(checkpoint: str, form: Format, arguments: dict[str, Any]) -> Sample | None:
    """Return what a format's engine samples; None where it quantises nothing of what it is to."""
    engine = VllmEngine(checkpoint, dtype="bfloat16", arguments=arguments)
    try:
        if "quantization" in form.arguments and engine.reading.quantization is None:
            return None
        prompts = [encode(row["prompt"]) for row in make_dataset(RESPONSES, seed=5000)]
        return engine.sample(prompts, responses=RESPONSES, max_tokens=TOKENS, sampling={"seed": 0})
    finally:
        engine.shutdown()


def _reason(error: Exception) -> str:
    """Return what vLLM said, without the settings that it was asked for."""
    text = " ".join(str(error).split())
    for mark in ("refuses the settings", "does not start with"):
        if mark in text:
            text = text.partition("}: ")[2] or text
    return text.partition("; if memory is short")[0][:240]


def figures(form: Format, sample: Sample, own: Path) -> dict[str, Any]:
    """Return gap, causes and what a correction leaves of the tokens that an engine sampled."""
    model = load_model(own)
    scorer = Scorer(model, sample, trainer_dtype="bfloat16", engine_dtype="bfloat16")
    gap = scorer.scores.trainer - sample.engine
    found: dict[str, Any] = {"tokens": len(gap)}
    per_response = Summed(sample)
    found["mean |Δlogp|"] = per_response.mean(np.abs(gap))
    found["k3"] = per_response.mean(np.expm1(gap) - gap)
    found["F(1.1)"] = per_response.mean((np.abs(gap) > np.log(1.1)).astype(np.float64))
    found["largest |Δlogp|"] = float(np.abs(gap).max())
    found["share of the gap's square"] = shares(form, scorer, gap, per_response)
    found["corrected"] = corrected(sample, gap)
    return found


class Summed:
    """Adds up what tokens have, response by response, for intervals over responses."""

    def __init__(self, sample: Sample) -> None:
        self._row = sample.row

    def __call__(self, values: Floats) -> Floats:
        """Return the sum of each response `[M]`."""
        return np.bincount(self._row, weights=values)

    def mean(self, values: Floats) -> dict[str, Any]:
        """Return the mean per token with its interval."""
        return bootstrap_ratio(self(values), self(np.ones_like(values))).to_dict()


def shares(form: Format, scorer: Scorer, gap: Floats, summed: Summed) -> dict[str, Any]:
    """Return the part of the gap's mean square that goes with each quantised part, and with all else.

    The model in float32 is changed one part after another on the same tokens. A part's share is the sum over tokens of the gap
    times what the part does to the log-probability, over the sum of the gap's squares; the rest is bfloat16's rounding.
    """
    found, rest = {}, gap.copy()
    before, model = scorer.logprobs(), scorer.model
    with ExitStack() as changed:
        for name, rounded in form.causes.items():
            changed.enter_context(changing(name, rounded, model))
            after = scorer.logprobs()
            effect, before = before - after, after
            rest -= effect
            found[name] = bootstrap_ratio(summed(gap * effect), summed(gap * gap)).to_dict()
    return found | {"rounding and all else": bootstrap_ratio(summed(gap * rest), summed(gap * gap)).to_dict()}


def changing(part: str, rounded: Round, model: nn.Module) -> Any:
    """Return the context in which a part of a model is quantised."""
    if part == "weights":
        return weights(model, quantised(model, rounded))
    if part == "activations":
        return RoundedInputs({id(m.weight): name for name, m in linear_layers(model).items()}, rounded)
    return Cached(rounded)


def corrected(sample: Sample, gap: Floats) -> dict[str, Any]:
    """Return what token weights leave, bounded as `advise` says of the measured tail.

    The bias is the largest error, over all functions of the token within ±1, of their mean under the trainer's policy: the mean
    of |weight - ratio| over sampled tokens, without weights that of |1 - ratio|.
    """
    count, longest = int(sample.row.max()) + 1, int(sample.place.max()) + 1
    old, mask = torch.zeros(count, longest), torch.zeros(count, longest, dtype=torch.bool)
    old[sample.row, sample.place] = torch.from_numpy(gap).float()
    mask[sample.row, sample.place] = True
    length = float(mask.sum()) / count
    advice = advise(sigma=float(gap.std()), mean=float(gap.mean()), length=length, keep=KEEP, measured=gap.tolist())
    upper = advice.token_bounds[1]
    config = CorrectionConfig(level="token", bound="truncate", upper=upper)
    weight = correct(torch.zeros_like(old), old, mask, config).weights[sample.row, sample.place].double().numpy()
    ratio, summed = np.exp(gap), Summed(sample)
    left = bootstrap_ratio(summed(np.abs(weight - ratio)), summed(np.abs(1 - ratio)))
    size = float(weight.sum() ** 2 / (len(weight) * (weight**2).sum()))
    return {
        "level advised": advice.level,
        "upper bound": upper,
        "upper bound, were the tail normal": advise(sigma=float(gap.std()), length=length, keep=KEEP).token_bounds[1],
        "effective sample size": size,
        "effective sample size, unbounded": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        "bias removed": {"value": 1 - left.value, "low": 1 - left.high, "high": 1 - left.low},
    }
