"""The `lr` section on an optimizer, as hosts drive it: what leads the rate, what is logged of it, and what is saved."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim import lr_scheduler as lrs

from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.gap import gap_metrics, gap_sums
from mismatch_ext.lr import (
    LrConfig,
    RateControl,
    gap_statistics,
    leading_statistics,
    length_statistics,
)

HALVED = LrConfig(period=2)
# A surge at step 2 makes a period of 2: halved from there on.
SURGING = LrConfig(floor=0.5, baseline_window=2)
# A third of a surge's baseline: a batch of 10, 10 and then 30 tokens is one.
GROWING = (10.0, 10.0, 30.0, 30.0)
# What TRL's and verl's adapters saved before they shared this class, after three of the steps above with a fourth collected.
OLD_FILES = json.loads((Path(__file__).parents[1] / "data/lr/states_of_the_first_release.json").read_text())
CONTROL = OLD_FILES["trl"]["control"]


@pytest.fixture(autouse=True)
def period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mismatch_ext.lr.controller.PERIOD_FACTOR", 1.0)


def optimizer(rate: float = 1.0) -> SGD:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    return SGD([weight], lr=rate)


def watched(given: SGD) -> list[float]:
    rates: list[float] = []
    given.register_step_pre_hook(lambda opt, *_: rates.append(float(opt.param_groups[0]["lr"])))
    return rates


def steps(rate: RateControl, given: SGD, lengths: Any, schedule: Any = None) -> list[float]:
    """Take a step per length; return the multiplier that is logged of each."""
    logged = []
    for length in lengths:
        rate.collect(response_length=length)
        rate.before_step()
        given.step()
        rate.after_step()
        if schedule is not None:
            schedule.step()
        logged.append(rate.metrics()["lr_multiplier"])
    return logged


def test_what_is_collected_leads_the_step_and_what_it_applied_is_logged() -> None:
    given = optimizer()
    schedule = lrs.LambdaLR(given, lambda step: 1 / (1 + step))
    rate = RateControl(SURGING)
    assert not rate.attached and rate.metrics() == {}
    rate.collect(response_length=1e9)  # before there is an optimizer: of no step
    rate.attach(given, schedule)
    rates = watched(given)
    assert steps(rate, given, GROWING, schedule) == [1.0, 1.0, 0.5, 0.5]
    assert rates == pytest.approx([1, 1 / 2, 1 / 6, 1 / 8])
    assert rate.metrics()["lr_surge_step"] == 2
    rate.detach()
    assert given.param_groups[0]["lr"] == pytest.approx(1 / 5) and rate.metrics() == {} and not rate.attached


def test_batches_of_a_step_are_averaged_by_weight_and_an_overflow_is_no_measurement() -> None:
    rate = RateControl(LrConfig(trigger="grad_norm", baseline_window=9))
    rate.attach(optimizer())
    rate.collect(1.0, grad_norm=2.0)
    rate.collect(3.0, grad_norm=6.0)
    rate.collect(0.0, grad_norm=99.0)
    rate.collect(1.0, grad_norm=float("inf"))
    rate.before_step()
    assert [m.value for m in rate.control.state.surge.history] == [5.0]
    rate.before_step()  # nothing new: nothing is measured
    assert [m.value for m in rate.control.state.surge.history] == [5.0]


def test_batches_of_lengths_count_by_their_responses() -> None:
    rate = RateControl(LrConfig(baseline_window=9))
    rate.attach(optimizer())
    for lengths in ([1000], [100] * 63):
        rate.collect(**length_statistics(torch.tensor(lengths)).to_dict())
    rate.before_step()
    assert [m.value for m in rate.control.state.surge.history] == [pytest.approx(7300 / 64)]


def test_a_batch_that_is_no_measurement_is_not_in_the_mean_of_the_others() -> None:
    given = optimizer()
    rate = RateControl(LrConfig(trigger="mismatch_kl", baseline_window=9))
    rate.attach(given)
    for statistics in ({"responses": 0.0}, {"mismatch_kl": 0.02}, {"responses": 0.0}, {"mismatch_kl": 0.04}):
        rate.collect(**statistics)
    rate.lead()
    assert [m.value for m in rate.control.state.surge.history] == [pytest.approx(0.03)]


def test_updates_of_several_optimizer_steps_count_once_and_need_statistics() -> None:
    given = optimizer()
    schedule = lrs.LambdaLR(given, lambda step: 1.0)
    rate = RateControl(SURGING, required="do this")
    rate.attach(given, schedule, updates=lambda: schedule.last_epoch)
    rates = watched(given)
    for length in GROWING:
        with pytest.raises(
            ConfigError, match="no statistics before this update, .*; do this, or give mismatch.lr.period"
        ):
            rate.before_step()
        rate.collect(response_length=length)
        rate.lead()
        for _ in range(3):
            rate.before_step()
            given.step()
            rate.after_step()
        schedule.step()
        rate.moved()
    assert rates == [1.0] * 6 + [0.5] * 6
    assert rate.control.state.step == 4


def test_a_norm_that_is_known_after_the_step_leads_a_later_one() -> None:
    given = optimizer()
    schedule = lrs.LambdaLR(given, lambda step: 1.0)
    rate = RateControl(LrConfig(trigger="grad_norm", baseline_window=9))
    rate.attach(given, schedule, updates=lambda: schedule.last_epoch)
    for norm in (3.0, float("nan"), 7.0):
        rate.collect()
        rate.lead()
        given.step()
        rate.after_step(norm)
        schedule.step()
        rate.moved()
    # Of the first step none was known; the second step's was not finite, so that the first's leads once more.
    assert [m.value for m in rate.control.state.surge.history] == [3.0, 3.0]


@pytest.mark.parametrize("several", [1, 2])
def test_state_goes_on_bit_for_bit_on_one_optimizer_or_several(several: int) -> None:
    def begun() -> tuple[RateControl, list[SGD]]:
        rate, all_of = RateControl(SURGING), [optimizer() for _ in range(several)]
        rate.attach(all_of if several > 1 else all_of[0])
        return rate, all_of

    def run(rate: RateControl, all_of: list[SGD], lengths: Any) -> list[list[float]]:
        seen = [watched(one) for one in all_of]
        for length in lengths:
            rate.collect(response_length=length)
            rate.before_step()
            for one in all_of:
                one.step()
            rate.after_step()
        return seen

    lengths = (10.0, 11.0, 40.0, 40.0, 90.0, 90.0)
    whole = run(*begun(), lengths)
    assert len({tuple(rates) for rates in whole}) == 1 and min(whole[0]) < 1
    for cut in range(1, len(lengths)):
        rate, all_of = begun()
        run(rate, all_of, lengths[:cut])
        rate.collect(response_length=lengths[cut])  # saved between a batch and its step
        saved = json.loads(json.dumps(rate.state_dict()))
        other, fresh = begun()
        other.load_state_dict(saved)
        seen = [watched(one) for one in fresh]
        other.before_step()
        for one in fresh:
            one.step()
        other.after_step()
        rest = run(other, fresh, lengths[cut + 1 :])
        assert [a[:1] + b for a, b in zip(seen, rest, strict=True)] == [rates[cut:] for rates in whole]


@pytest.mark.parametrize("host", OLD_FILES)
def test_files_of_earlier_releases_load(host: str) -> None:
    given = optimizer()
    schedule = lrs.LambdaLR(given, lambda step: 1.0)
    schedule.last_epoch = 3
    rate = RateControl(SURGING)
    if host == "trl":
        rate.attach(given)
    else:
        rate.attach(given, schedule, updates=lambda: schedule.last_epoch)
    rate.load_state_dict(OLD_FILES[host])
    assert (rate.control.multiplier, rate.control.state.step, rate.control.state.surge_step) == (0.5, 3, 2)
    assert rate.state_dict()["collected"] == OLD_FILES[host].get("collected", [])


def test_a_checkpoint_without_state_is_joined_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rate = RateControl(HALVED)
    rate.attach(optimizer(), step=2)
    assert rate.control.multiplier == 0.5 and not caplog.records
    rate.load_state_dict(None)
    assert (
        "checkpoint of step 2 holds no state of mismatch.lr: the rate is controlled from here on, with multiplier 0.5"
        in (caplog.text)
    )


@pytest.mark.parametrize(
    "state, words",
    [
        ({"control": {**CONTROL, "trigger": "grad_norm"}}, "the state is of trigger 'grad_norm'"),
        ({"control": {**CONTROL, "triggers": -1}}, "triggers=-1"),
        ({"grad_norm": None}, "KeyError: 'control'"),
        ({"control": CONTROL, "collected": [[1.0]]}, "ValueError"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: Any, words: str) -> None:
    rate = RateControl(SURGING, kept_in="a file")
    rate.attach(optimizer())
    with pytest.raises(RecordError) as refused:
        rate.load_state_dict(state)
    assert str(refused.value).startswith("mismatch.lr cannot go on from this checkpoint: ")
    assert words in str(refused.value) and str(refused.value).endswith("out of the checkpoint (a file).")


def test_a_training_shorter_than_the_baseline_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for config, length, said in ((SURGING, 2, True), (SURGING, 3, False), (SURGING, 0, False), (HALVED, 1, False)):
        caplog.clear()
        RateControl(config).attach(optimizer(), steps=length)
        assert ("waits for a surge over a baseline" in caplog.text) is said


def test_an_optimizer_that_cannot_be_controlled_is_refused() -> None:
    with pytest.raises(ConfigError, match="mismatch.lr cannot control the optimizer of this trainer: .*found object"):
        RateControl(HALVED).attach(object())


def test_statistics_that_lead_the_rate() -> None:
    # Tools wrote two of the second response's tokens: the policy's own are six, and it has reached the limit all the same.
    lengths, truncated = torch.tensor([4, 6, 8]), torch.tensor([False, True, True])
    found = leading_statistics("response_length", lengths, truncated, {})
    assert found == {"responses": 3, "response_length": 6.0, "truncated_fraction": 2 / 3}
    gap = gap_metrics(
        gap_sums(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -3.0]]), torch.tensor([[True, True]]))
    )
    found = leading_statistics("f_tau", lengths, truncated, gap)
    assert found["f_tau"] == 0.5 and found["mismatch_kl"] == pytest.approx((2.718281828 - 2) / 2)
    assert leading_statistics("f_tau", lengths, truncated, {}) == {}
    assert leading_statistics("grad_norm", lengths, truncated, gap) == {}


def test_a_gap_over_ranks_is_one_over_their_tokens() -> None:
    old = torch.tensor([[-1.0, -2.0, -1.0], [-3.0, -1.0, -1.0]])
    rollout = torch.tensor([[-1.0, -3.0, -1.5], [-3.1, -1.0, -1.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    tokens, whole = gap_statistics(old, rollout, mask)
    parts = [(old[:1], rollout[:1], mask[:1]), (old[1:], rollout[1:], mask[1:]), (old[:1], rollout[:1], ~mask[:1])]
    seen: list[torch.Tensor] = []

    def gathering(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        seen.append(tensor)
        return tensor

    for part in parts:
        gap_statistics(*part, reduce=gathering)
    for part in parts:
        assert gap_statistics(*part, reduce=lambda tensor, reduction: torch.stack(seen).sum(0)) == (
            tokens, {name: pytest.approx(value, rel=1e-12) for name, value in whole.items()},
        )  # fmt: skip
    assert tokens == 4
