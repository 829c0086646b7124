"""The KL coefficient's controller on plants whose answer is known."""

from __future__ import annotations

import json
import math

import pytest

from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.kl import KlController


def controller(initial: float = 0.1) -> KlController:
    return KlController(initial, 0.02)


def test_without_settings_the_coefficient_is_constant() -> None:
    constant = KlController(0.3)
    assert [constant.update(kl) for kl in (0.0, 100.0, -1.0)] == [0.3] * 3
    assert constant.state.steps == 3


def test_three_steps_by_hand() -> None:
    # Twice the target: e clipped from 1 to 0.2. First log coef = log 0.1 + 0 + 0.1 * 0.2, then the integral is 0.01.
    # Then 0.9 of the target: e = -0.1, the integral 0.005, log coef = log 0.1 + 0.005 - 0.01. Then nothing at all: e is
    # clipped from -1 to -0.2, the integral -0.005.
    led = controller()
    assert led.update(0.04) == pytest.approx(0.1 * math.exp(0.01 + 0.02), rel=1e-12)
    assert led.update(0.018) == pytest.approx(0.1 * math.exp(0.005 - 0.01), rel=1e-12)
    assert led.update(0.0) == pytest.approx(0.1 * math.exp(-0.005 - 0.02), rel=1e-12)


@pytest.mark.parametrize("start", [0.001, 0.1, 5.0])
@pytest.mark.parametrize("lag", [1.0, 0.1])
def test_it_converges_on_a_plant(start: float, lag: float) -> None:
    # Near the reference an optimised policy has KL ~ 1 / coef^2; the policy follows with a first-order lag. The target
    # 0.02 is met at coef = sqrt(2e-4 / 0.02) = 0.1.
    led, log_kl = controller(start), math.log(2e-4 / start**2)
    for _ in range(3000):
        log_kl += lag * (math.log(2e-4 / led.coef**2) - log_kl)
        led.update(math.exp(log_kl))
    assert led.coef == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize(("measured", "bound"), [(10.0, 10.0), (1e-9, 1e-6)])
def test_nothing_winds_up_at_a_bound(measured: float, bound: float) -> None:
    led = controller()
    for _ in range(2000):
        led.update(measured)
    assert led.coef == bound
    short = led.state
    for _ in range(10_000):
        led.update(measured)
    assert led.state.integral == short.integral
    # The first measurement on the other side of the target moves the coefficient off the bound.
    led.update(0.03 if bound == 1e-6 else 0.01)
    assert 1e-6 < led.coef < 10


def test_step_changes_nothing() -> None:
    led = controller()
    state, coef = led.step(led.state, 0.05)
    assert (led.state.coef, led.state.integral, led.state.steps) == (0.1, 0.0, 0)
    assert state.coef == coef == led.step(led.state, 0.05)[1] == led.update(0.05)


def test_a_resumed_run_goes_on_identically() -> None:
    measured = [0.02 * (1 + math.sin(k)) for k in range(60)]
    whole, first = controller(), controller()
    want = [whole.update(kl) for kl in measured]
    got = [first.update(kl) for kl in measured[:25]]
    second = controller()
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert second.coef == first.coef
    got += [second.update(kl) for kl in measured[25:]]
    assert got == want and second.state_dict() == whole.state_dict()


def test_a_changed_first_coefficient_begins_anew_and_is_told() -> None:
    led = controller()
    for _ in range(5):
        led.update(0.5)
    assert led.coef != 0.1 and led.state.integral != 0
    again = controller(initial=0.3)
    said = again.load_state_dict(led.state_dict())
    assert said is not None and "mismatch.kl.coef was 0.1 and is 0.3" in said and "begins anew from 0.3" in said
    assert again.state_dict() == controller(initial=0.3).state_dict()
    assert controller().load_state_dict(led.state_dict()) is None
    constant = KlController(0.1)
    assert "was 0.1 in the checkpoint and is 0.4 now" in str(KlController(0.4).load_state_dict(constant.state_dict()))


def test_loading_keeps_this_run_s_settings() -> None:
    led = controller()
    led.update(0.5)
    constant = KlController(0.4)
    constant.load_state_dict(led.state_dict())
    assert constant.coef == 0.4 and constant.update(1.0) == 0.4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_measurement_does_not_lead_and_leaves_the_state(bad: float) -> None:
    led, constant = controller(), KlController(0.1)
    before = led.state_dict(), constant.state_dict()
    with pytest.raises(RecordError, match="the measured KL is"):
        led.update(bad)
    with pytest.warns(UserWarning, match="the measured KL is"):
        assert constant.update(bad) == 0.1
    assert (led.state_dict(), constant.state_dict()) == before


@pytest.mark.parametrize("initial", [0.0, -1.0, math.nan, 1e-9, 11.0])
def test_a_start_that_cannot_be_is_refused(initial: float) -> None:
    with pytest.raises(ConfigError, match="mismatch.kl.coef"):
        controller(initial)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"coef": math.nan},
        {"coef": -1.0},
        {"integral": "0"},
        {"steps": True},
        {"steps": -1},
        {"extra": 1},
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, object]) -> None:
    led = controller()
    with pytest.raises(RecordError, match="KL controller's state"):
        led.load_state_dict({**led.state_dict(), **change})
    missing = {key: value for key, value in led.state_dict().items() if key != "integral"}
    with pytest.raises(RecordError, match="keys"):
        led.load_state_dict(missing)
