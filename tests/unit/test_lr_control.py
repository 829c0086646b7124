"""The rule on torch optimizers: what is applied and when, what is collected for it, what a checkpoint holds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as lrs

from mismatch_ext.config import LrConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.lr import LrControl, length_statistics, length_sums
from mismatch_ext.precision.scaler import LossScaler

HALVING = LrConfig(period=1)
SURGING = LrConfig(floor=0.5, baseline_window=2, warmup_steps=0)
# Twice the baseline at step 2, so that the period is round(1.8 * 2) = 4.
GROWING = (10.0, 10.0, 30.0, 30.0, 30.0, 30.0)


def model(*, tensors: bool = False) -> tuple[list[torch.nn.Parameter], SGD]:
    """Two groups of one parameter each: one step of SGD at gradient 1 moves a parameter by its learning rate."""
    weights = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
    rates: list[Any] = [torch.tensor(r, dtype=torch.float64) if tensors else r for r in (0.4, 0.08)]
    return weights, SGD([{"params": [w], "lr": r} for w, r in zip(weights, rates, strict=True)], lr=1.0)


def step_of(weights: Sequence[torch.nn.Parameter], optimizer: Any, control: LrControl | None = None) -> list[float]:
    """Take a step at gradient 1 and return by how much each weight moved: the rate that was applied."""
    before = [w.item() for w in weights]
    for w in weights:
        w.grad = torch.ones_like(w)
    if control is None:
        optimizer.step()
    else:
        with control.applied():
            optimizer.step()
    return [b - w.item() for b, w in zip(before, weights, strict=True)]


def near(rates: Sequence[float], multiplier: float = 1.0) -> Any:
    return pytest.approx([float(r) * multiplier for r in rates], rel=1e-9, abs=1e-15)


def test_rates_of_any_kind_are_multiplied_and_are_the_same_objects_afterwards() -> None:
    weights, optimizer = model(tensors=True)
    rate = torch.tensor(0.4, dtype=torch.float64)
    for group in optimizer.param_groups:
        group["lr"] = rate  # one tensor, which both groups share
    control = LrControl(HALVING, optimizer)
    assert [step_of(weights, optimizer, control) for _ in range(2)] == [near([0.4, 0.4]), near([0.2, 0.2])]
    assert all(group["lr"] is rate for group in optimizer.param_groups) and rate.item() == 0.4
    # A group that is added later, and a rate that is set by hand.
    weights.append(torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    optimizer.add_param_group({"params": [weights[-1]], "lr": 3.0})
    optimizer.param_groups[0]["lr"] = 0.8
    assert step_of(weights, optimizer, control) == near([0.2, 0.1, 0.75])


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, LossScaler])
def test_a_step_that_the_scaler_skips_does_not_count(scaler_class: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = AdamW([weight], lr=0.1, fused=True)
    scaler = scaler_class("cpu", init_scale=64.0)
    control = LrControl(LrConfig(period=2), optimizer)
    counted = []
    for overflow in (True, False, True, False, False):
        scaler.scale(weight.sum() * (float("inf") if overflow else 1.0)).backward()
        with control.applied():
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        counted.append((control.state.step, control.multiplier))
    assert counted == [(0, 1), (1, 1), (1, 1), (2, 0.5), (3, 0.5)]


class ByGroup:
    """As DeepSpeed's optimizers: no torch optimizer itself, and steps the inner one group by group."""

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        groups = self.optimizer.param_groups
        for group in groups:
            self.optimizer.param_groups = [group]
            self.optimizer.step()
        self.optimizer.param_groups = groups


class Nested(SGD):
    """Its `step` calls its parent's, so torch runs the hooks of both; it can also run out of memory."""

    fail = False

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise torch.OutOfMemoryError("no memory")
        return super().step(closure)


def test_wrappers_that_step_by_group_and_steps_that_call_their_parents_count_once() -> None:
    weights, optimizer = model()
    wrapper = ByGroup(optimizer)
    control = LrControl(HALVING, wrapper)
    assert [step_of(weights, wrapper, control) for _ in range(2)] == [near([0.4, 0.08]), near([0.2, 0.04])]
    nested = Nested([weights[0]], lr=1.0)  # torch has hooked SGD's own `step` too, since one was made above
    control = LrControl(HALVING, nested)
    assert [step_of(weights[:1], nested, control)[0] for _ in range(3)] == [pytest.approx(x) for x in (1.0, 0.5, 0.25)]


def test_a_step_that_raises_leaves_no_multiplied_rate_behind() -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Nested([weight], lr=1.0)
    schedule = lrs.ExponentialLR(optimizer, gamma=0.5)
    control = LrControl(HALVING, optimizer)
    step_of([weight], optimizer, control)
    optimizer.fail = True
    with pytest.raises(torch.OutOfMemoryError):
        step_of([weight], optimizer, control)
    optimizer.fail = False
    assert optimizer.param_groups[0]["lr"] == 1.0
    schedule.step()
    assert step_of([weight], optimizer, control) == [0.25]


def test_a_step_without_control_is_an_error_until_the_control_is_closed() -> None:
    weights, optimizer = model()
    control = LrControl(LrConfig(period=100), optimizer)
    with pytest.raises(ConfigError, match="SGD is stepped without mismatch.lr"):
        step_of(weights, optimizer)
    assert not any(weight.item() for weight in weights)  # it comes before the step
    control.close()
    step_of(weights, optimizer)
    with pytest.raises(ConfigError, match="which is no torch.optim.Optimizer"):
        LrControl(HALVING, object())


def test_the_step_by_which_torch_makes_an_optimizers_state_does_not_count_and_one_of_warmup_does() -> None:
    linear = torch.nn.Linear(2, 2)
    optimizer = AdamW(linear.parameters(), lr=0.1)
    control = LrControl(HALVING, optimizer)
    get_optimizer_state_dict(linear, optimizer)
    assert optimizer.state and control.state.step == 0 and optimizer.param_groups[0]["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = 0.0
    with control.applied():
        optimizer.step()
    assert control.state.step == 1


# What leads it.


def led(control: LrControl, *batches: Any) -> list[float]:
    """Give batches to a control, and return what it has measured of them."""
    for statistics, weight in batches:
        control.collect(statistics, weight)
    control.lead()
    return [measurement.value for measurement in control.state.history]


def test_what_is_collected_leads_the_step_and_what_it_applied_is_logged() -> None:
    weights, optimizer = model()
    control, applied = LrControl(SURGING, optimizer), []
    for length in GROWING:
        control.collect({"response_length": length})
        applied.append(step_of(weights, optimizer, control)[0])
    assert applied == near([0.4] * 4 + [0.2] * 2)
    assert control.metrics()["lr_multiplier"] == 0.5 and control.metrics()["lr_surge_step"] == 2


def test_batches_of_a_step_are_averaged_and_what_is_no_measurement_is_left_out() -> None:
    norms = LrControl(LrConfig(trigger="grad_norm", baseline_window=9), model()[1])
    batches = [({"grad_norm": norm}, weight) for norm, weight in ((2.0, 1.0), (6.0, 3.0), (99.0, 0.0), (math.inf, 1.0))]
    assert led(norms, *batches) == [5.0]
    assert led(norms) == [5.0]  # nothing new: nothing is measured
    lengths = LrControl(LrConfig(baseline_window=9), model()[1])
    batches = [(length_statistics(length_sums(torch.tensor(batch))), 1.0) for batch in ([1000], [100] * 63)]
    assert led(lengths, *batches) == [pytest.approx(7300 / 64)]


def test_updates_of_several_optimizer_steps_count_once_and_need_statistics() -> None:
    weights, optimizer = model()
    updates, applied = 0, []
    control = LrControl(SURGING, optimizer, updates=lambda: updates, required="do this")
    for length in GROWING:
        with pytest.raises(ConfigError, match="no statistics before this update, .*; do this, or give mismatch.lr"):
            step_of(weights, optimizer, control)
        control.collect({"response_length": length})
        assert control.lead()["lr_multiplier"] == control.multiplier
        applied += [step_of(weights, optimizer, control)[0] for _ in range(3)]
        updates += 1
    assert applied == near([0.4] * 12 + [0.2] * 6)


def test_a_norm_that_is_known_after_the_step_leads_a_later_one() -> None:
    updates = 0
    control = LrControl(LrConfig(trigger="grad_norm", baseline_window=9), model()[1], updates=lambda: updates)
    for norm in (3.0, math.nan, 7.0):
        led(control, ({}, 1.0))
        control.note_grad_norm(norm)
        updates += 1
    # Of the first step none was known; the second step's was not finite, so that the first's leads once more.
    assert [measurement.value for measurement in control.state.history] == [3.0, 3.0]


# Checkpoints.


def test_state_goes_on_bit_for_bit_on_several_optimizers() -> None:
    lengths = (10.0, 11.0, 40.0, 40.0, 90.0, 90.0)

    def begun() -> tuple[LrControl, list[tuple[list[torch.nn.Parameter], SGD]]]:
        sides = [model(), model()]
        return LrControl(SURGING, *(optimizer for _, optimizer in sides)), sides

    def run(control: LrControl, sides: Any, lengths: Sequence[float]) -> list[list[float]]:
        moves = []
        for length in lengths:
            if not control._collected:
                control.collect({"response_length": length})
            parameters = [weight for weights, _ in sides for weight in weights]
            for weight in parameters:
                weight.data.zero_()
                weight.grad = torch.ones_like(weight)
            with control.applied():
                for _, optimizer in sides:
                    optimizer.step()
            moves.append([-weight.item() for weight in parameters])
        return moves

    whole = run(*begun(), lengths)
    assert whole[0] != pytest.approx(whole[-1])
    for cut in range(1, len(lengths)):
        control, sides = begun()
        run(control, sides, lengths[:cut])
        control.collect({"response_length": lengths[cut]})  # saved between a batch and its step
        saved = json.loads(json.dumps(control.state_dict()))
        other, fresh = begun()
        other.load_state_dict(saved)
        assert run(other, fresh, lengths[cut:]) == whole[cut:]


def test_a_checkpoint_without_state_is_joined_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    control = LrControl(LrConfig(period=2), model()[1], step=2)
    assert control.multiplier == 0.5 and not caplog.records
    control.load_state_dict(None)
    words = (
        "checkpoint of step 2 holds no state of mismatch.lr: the rate is controlled from here on, with multiplier 0.5"
    )
    assert words in caplog.text


def test_a_state_that_does_not_fit_is_refused() -> None:
    control = LrControl(SURGING, model()[1])
    saved = control.state_dict()
    with pytest.raises(RecordError, match="the state of mismatch.lr is of trigger 'grad_norm'"):
        control.load_state_dict({**saved, "control": {**saved["control"], "trigger": "grad_norm"}})
