"""The gap of one format on a real engine: its size and tail, the shares of its parts, and what a correction leaves of it.

Suffixes of shapes: N tokens of all responses; V ids of the vocabulary.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.transformers.doctor.models import load_model
from torch import nn

from benchmarks.quantised import advice
from benchmarks.quantised.engines import Floats, start, whole
from benchmarks.quantised.formats import Format, served
from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from examples.arithmetic.tokenizer import VOCABULARY, encode
from examples.bootstrap import bootstrap_ratio
from mismatch_ext.config import CorrectionConfig
from mismatch_ext.correction import correct
from mismatch_ext.doctor import Sample
from mismatch_ext.errors import EngineError

RESPONSES, TOKENS, KEEP = 1792, 112, 0.99
SHARES, REST = "share of the divergence", "rounding and all else"


def measured(kind: str, form: Format, responses: int = RESPONSES) -> dict[str, Any]:
    """Return the figures of a format, or `{"refused": why}` where this engine does not run it on this machine.

    Args:
        kind: "vllm" or "sglang".
        form: The format.
        responses: How many are sampled.
    """
    own = FOLDER / "dense"
    prompts = [encode(row["prompt"]) for row in make_dataset(responses, seed=5000)]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = served(form, own, Path(folder) / "served")
        try:
            engine = start(kind, checkpoint, form.arguments, len(VOCABULARY))
        except EngineError as error:
            return {"refused": _reason(error)}
        try:
            if form.parts and not engine.quantises():
                return {"refused": "starts, and leaves all layers of a dense model in bfloat16"}
            try:
                sample = engine.sample(prompts, TOKENS)
            except AttributeError as error:  # a CPU's build has no kernel, which the first request finds out
                return {"refused": _reason(error)}
            with engine.compared_inputs() as counted:
                arms = [engine.distributions(sample)]
            # A format that rounds what goes into layers on one machine may leave it as it is on another.
            parts = form.parts if counted.get("values") else form.parts[:1]
            if len(parts) > 1:
                with engine.whole_inputs(checkpoint):
                    arms.insert(0, engine.distributions(sample))
        finally:
            engine.shutdown()
    if form.parts:
        plain = start(kind, own, {}, len(VOCABULARY))
        try:
            arms.insert(0, plain.distributions(sample))
        finally:
            plain.shutdown()
    found = figures(parts, sample, arms, distributions(load_model(own), sample))
    return found | ({"values into quantised layers": counted} if counted.get("values") else {})


def _reason(error: Exception) -> str:
    """Return the beginning of what an engine said, without the settings that SGLang's begins with."""
    said = str(error)
    return (said.partition("}: ")[2] or said)[:240]


@torch.no_grad()
def distributions(model: nn.Module, sample: Sample, batch: int = 64) -> Floats:
    """Return the trainer's log-probabilities of every id at every token of the responses `[N, V]`, its products in bfloat16."""
    found, rows = [], whole(sample)
    for first in range(0, len(rows), batch):
        some = [torch.tensor(ids) for ids in rows[first : first + batch]]
        ids = nn.utils.rnn.pad_sequence(some, batch_first=True)
        there = nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in some], batch_first=True)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=there, use_cache=False).logits
        said = logits.float().log_softmax(-1).double().numpy()
        for row, prompt in enumerate(sample.prompts[first : first + batch]):
            found.append(said[row, len(prompt) - 1 : len(some[row]) - 1])
    return np.concatenate(found)


def figures(parts: tuple[str, ...], sample: Sample, arms: list[Floats], trainer: Floats) -> dict[str, Any]:
    """Return the gap, the shares of its parts, and what a correction leaves of it.

    Args:
        parts: What is quantised.
        sample: What the engine sampled, with its log-probabilities.
        arms: The log-probabilities `[N, V]` of the same tokens by the engine without quantisation, with its parts added one after
            another, and with all of them last.
        trainer: The trainer's.
    """
    gap = trainer[np.arange(len(trainer)), sample.tokens] - sample.engine
    summed = Summed(sample)
    found: dict[str, Any] = {"tokens": len(gap)}
    found["mean |Δlogp|"] = summed.mean(np.abs(gap))
    found["k3"] = summed.mean(np.expm1(gap) - gap)
    found["F(1.1)"] = summed.mean((np.abs(gap) > np.log(1.1)).astype(np.float64))
    found["largest |Δlogp|"] = float(np.abs(gap).max())
    reached = [divergence(trainer, arm) for arm in arms]
    found["divergence"] = summed.mean(reached[-1])
    if parts:
        added = dict(
            zip(parts, (after - before for before, after in zip(reached[:-1], reached[1:], strict=True)), strict=True)
        )
        found[SHARES] = {name: summed.share(one, reached[-1]) for name, one in (added | {REST: reached[0]}).items()}
    return found | {"corrected": corrected(sample, gap)}


def divergence(trainer: Floats, engine: Floats) -> Floats:
    """Return the Kullback-Leibler divergence of an engine from the trainer at each token `[N]`, over the whole vocabulary.

    It is what k3 is an estimate of from sampled tokens alone, without the noise of which token was sampled.
    """
    gap = trainer - engine
    found: Floats = (np.exp(engine) * (np.expm1(gap) - gap)).sum(-1)
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

    def share(self, part: Floats, of: Floats) -> dict[str, Any]:
        """Return the share of one sum in another with its interval."""
        return bootstrap_ratio(self(part), self(of)).to_dict()


def corrected(sample: Sample, gap: Floats) -> dict[str, Any]:
    """Return what token weights leave, bounded by the quantile of the measured tail.

    The bias is the largest error, over all functions of the token within ±1, of their mean under the trainer's policy: the mean
    of |weight - ratio| over sampled tokens, without weights that of |1 - ratio|.
    """
    count, longest = int(sample.row.max()) + 1, int(sample.place.max()) + 1
    old, mask = torch.zeros(count, longest), torch.zeros(count, longest, dtype=torch.bool)
    old[sample.row, sample.place] = torch.from_numpy(gap).float()
    mask[sample.row, sample.place] = True
    length = float(mask.sum()) / count
    sigma, mean = float(gap.std()), float(gap.mean())
    upper = advice.token_bound(sigma=sigma, mean=mean, keep=KEEP, measured=gap.tolist())
    config = CorrectionConfig(level="token", bound="truncate", upper=upper)
    weight = correct(torch.zeros_like(old), old, mask, config).weights[sample.row, sample.place].double().numpy()
    ratio, summed = np.exp(gap), Summed(sample)
    left = bootstrap_ratio(summed(np.abs(weight - ratio)), summed(np.abs(1 - ratio)))
    size = float(weight.sum() ** 2 / (len(weight) * (weight**2).sum()))
    return {
        "level advised": advice.level(sigma=sigma, mean=mean, length=length, keep=KEEP),
        "upper bound": upper,
        "upper bound, were the tail normal": advice.token_bound(sigma=sigma, keep=KEEP),
        "effective sample size": size,
        "effective sample size, unbounded": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        "bias removed": {"value": 1 - left.value, "low": 1 - left.high, "high": 1 - left.low},
    }
