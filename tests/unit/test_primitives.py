"""One primitive by itself: settings as text, mapping or section; one sequence; no token at all; errors about arguments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_ext import (
    PRESETS,
    CorrectionConfig,
    KlConfig,
    LrControl,
    correct,
    gap_metrics,
    gap_sums,
    kl_terms,
)
from mismatch_ext.errors import ConfigError, MismatchError

torch.manual_seed(0)
OLD, SAMPLED = -torch.rand(3, 7), -torch.rand(3, 7)
MASK = torch.rand(3, 7) > 0.2


def corrected(config: Any, row: int | None = None) -> Any:
    old, sampled, mask = (x if row is None else x[row] for x in (OLD, SAMPLED, MASK))
    return correct(old_logprobs=old, rollout_logprobs=sampled, response_mask=mask, config=config)


@pytest.mark.parametrize("config", ["tis", {"preset": "tis"}, CorrectionConfig(preset="tis"), PRESETS["tis"]])
def test_a_correction_is_a_name_a_mapping_or_a_section(config: Any) -> None:
    assert torch.equal(corrected(config).weights, corrected(PRESETS["tis"]).weights)


@pytest.mark.parametrize("settings", [{"estimator": "k3", "coef": 1.0}, KlConfig(estimator="k3", coef=1.0), "k3"])
def test_a_kl_term_is_a_name_a_mapping_or_a_section(settings: Any) -> None:
    expected = kl_terms(logprobs=OLD, ref_logprobs=SAMPLED, mask=MASK, settings=KlConfig(estimator="k3"), coef=1.0)
    assert torch.equal(kl_terms(logprobs=OLD, ref_logprobs=SAMPLED, mask=MASK, settings=settings).loss, expected.loss)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("tiss", r"^config\.preset: unknown preset 'tiss'"),
        ({"presett": "tis"}, r"^config: unknown key 'presett'"),
        (3, "^config: 3"),
    ],
)
def test_an_error_speaks_of_the_argument(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        corrected(config)
    assert "mismatch." not in str(raised.value)


def test_one_sequence_is_a_batch_of_one() -> None:
    one, whole = (
        kl_terms(logprobs=OLD[rows], ref_logprobs=SAMPLED[rows], mask=MASK[rows], settings="k3")
        for rows in (0, slice(1))
    )
    assert torch.equal(one.loss, whole.loss[0])
    assert torch.equal(corrected("tis", 0).weights, corrected("tis").weights[0])
    sums, of_batch = (gap_sums(old=OLD[rows], rollout=SAMPLED[rows], mask=MASK[rows]) for rows in (0, slice(1)))
    assert gap_metrics(sums) == gap_metrics(of_batch)


def test_a_batch_without_a_token_gives_zeros() -> None:
    nothing = torch.zeros_like(MASK)
    found = correct(old_logprobs=OLD, rollout_logprobs=SAMPLED, response_mask=nothing, config="tis")
    assert not found.weights.any() and not found.mask.any() and found.metrics == {}
    assert not kl_terms(logprobs=OLD, ref_logprobs=SAMPLED, mask=nothing, settings="k3").loss.any()
    assert gap_metrics(gap_sums(old=OLD, rollout=SAMPLED, mask=nothing)) == {}


def test_sequences_of_different_dimensions_are_refused() -> None:
    with pytest.raises(MismatchError):
        kl_terms(logprobs=OLD, ref_logprobs=SAMPLED[0], mask=MASK, settings="k3")
    with pytest.raises(MismatchError):
        correct(old_logprobs=OLD[0], rollout_logprobs=SAMPLED, response_mask=MASK[0], config="tis")


@pytest.mark.parametrize(
    ("page", "shows"),
    [("README.md", "loss"), ("docs/kl.md", "loss"), ("docs/correction.md", "pull"), ("docs/lr.md", "control")],
)
def test_the_function_of_a_page_runs_as_pasted(page: str, shows: str) -> None:
    text = (Path(__file__).resolve().parents[2] / page).read_text(encoding="utf-8")
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "from mismatch_ext import" in block
    )
    names: dict[str, Any] = {}
    exec(code, names)
    shown = names[shows]
    if isinstance(shown, LrControl):
        assert shown.last_multiplier == 1.0
        return
    assert bool(shown.isfinite()) and float(shown) != 0.0
    if page != "README.md":
        names["loss"].backward()
