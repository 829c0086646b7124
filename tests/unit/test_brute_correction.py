"""Corrections against a reference in loops, over random presets, settings, shapes, dtypes, masks and garbage under the mask."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_ext.config import CorrectionConfig
from mismatch_ext.correction import correct
from mismatch_ext.errors import ConfigError
from mismatch_ext.presets import DPPO, PRESETS, RULES, ResolvedCorrection, resolve
from tests.oracles.brute.correction import weights_and_mask

pytestmark = pytest.mark.numeric

SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(20, 3000))]


def section(rng: random.Random) -> dict[str, Any]:
    """Return the keys of a random `correction` section; it may contradict itself."""
    if rng.random() < 0.4:
        return {
            "preset": rng.choice(list(PRESETS)),
            **({"veto": rng.choice([0.5, 0.9, 1e-4])} if rng.random() < 0.3 else {}),
        }
    keys: dict[str, Any] = {}
    level = rng.choice(["none", "token", "sequence", "geometric"])
    if level != "none":
        keys = {"level": level, "bound": rng.choice(["truncate", "mask", "clip", "icepop"])}
        lower, upper = rng.choice([0.5, 0.9, 0.999, 1.0]), rng.choice([1.0, 1.001, 1.5, 5.0])
        if keys["bound"] == "icepop" or rng.random() < 0.5:
            keys |= {"lower": lower, "upper": upper}
        else:
            keys |= rng.choice([{"upper": upper}, {"lower": lower}])
        if rng.random() < 0.25:
            keys["normalize"] = True
    if rng.random() < 0.6:
        ratios = [(0.5, 2.0), (0.999, 1.001), (0.9, 3.0), 1.3, 0.7]
        keys["reject"] = {
            name: rng.choice(ratios if name.endswith("k1") else [0.01, 1e-4, 0.5, 3.0])
            for name in rng.sample(RULES, rng.choice([1, 1, 2, 3]))
        }
    if rng.random() < 0.2:
        keys["veto"] = rng.choice([0.5, 0.9, 1e-4])
    if rng.random() < 0.2:
        keys["off_policy_threshold"] = rng.choice([0.0, 0.1, -0.1])
    if keys and rng.random() < 0.2:
        keys |= {"mode": "bypass", "loss": "reinforce"}
    return keys


def settled(rng: random.Random) -> ResolvedCorrection:
    """Return settings that do not contradict themselves, some with a quirk of verl."""
    while True:
        try:
            settings = resolve(CorrectionConfig(**section(rng)))
        except ConfigError:
            continue
        if settings.loss in DPPO:
            continue  # the reference has no trust region; tests/unit/test_dppo.py does
        quirks = frozenset({"verl_inverse_k1"}) if rng.random() < 0.2 else frozenset()
        return dataclasses.replace(settings, compat=quirks)


def batch(rng: random.Random, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return both sides' log-probabilities, with garbage under the mask, and the mask."""
    rows, width = rng.choice([1, 2, 3, 5, 9]), rng.choice([1, 2, 5, 17, 40])
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
    scale = rng.choice([1e-6, 1e-3, 0.02, 0.3, 2.0, 30.0])
    rollout = (-5 * torch.rand(rows, width, generator=generator, dtype=torch.float64)).to(dtype)
    noise = scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    old = (rollout.double() + noise).to(dtype)
    columns = torch.arange(width)[None]
    mask = {
        "right": columns < torch.randint(1, width + 1, (rows, 1), generator=generator),
        "left": columns >= torch.randint(0, width, (rows, 1), generator=generator),
        "holes": torch.rand(rows, width, generator=generator) < 0.6,
        "full": columns.expand(rows, -1) >= 0,
        "empty row": (columns >= 0) & (torch.arange(rows) != rng.randrange(rows))[:, None],
    }[rng.choice(["right", "left", "holes", "full", "empty row"])]
    if not mask.any():
        mask[0, 0] = True
    blotted = [
        torch.where(mask, side, torch.tensor(rng.choice([0.0, math.nan, math.inf, -math.inf]), dtype=dtype))
        for side in (rollout, old)
    ]
    return blotted[0], blotted[1], mask


def compare(settings: ResolvedCorrection, seed: int, batches: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(batches):
        rollout, old, mask = batch(rng, generator)
        advantages = torch.randn(rng.choice([mask.shape[:1], mask.shape]), generator=generator)
        # A shift that is no difference of thresholds, so that no sum lies on one.
        current = torch.where(mask, old.double() + 0.13, 0.0) if rng.random() < 0.5 else None
        given = rng.choice([mask, mask.int(), mask.float(), mask.long()])
        got = correct(
            old_logprobs=old,
            rollout_logprobs=rollout,
            response_mask=given.clone(),
            config=settings,
            advantages=advantages,
            logprobs=current,
        )
        weights, kept = weights_and_mask(rollout, old, mask, settings, advantages, current)
        assert float(((got.weights.double() - weights).abs() / (1 + weights)).max()) <= 3e-6
        assert torch.equal(got.mask, kept)


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_and_rejection(seed: int) -> None:
    compare(settled(random.Random(seed)), seed, batches=5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("threshold", [1.02, 1.5])
def test_each_rule_alone(rule: str, threshold: float) -> None:
    bound = threshold if rule.endswith("k1") else math.log(threshold) ** 2 / 2
    compare(resolve(CorrectionConfig(reject={rule: bound})), seed=0, batches=40)


@pytest.mark.parametrize("keys", [{"veto": 0.5}, {"veto": 0.95}, {"off_policy_threshold": 0.1}], ids=str)
def test_vetoes_of_sequences(keys: dict[str, float]) -> None:
    compare(resolve(CorrectionConfig(**keys)), seed=0, batches=40)
