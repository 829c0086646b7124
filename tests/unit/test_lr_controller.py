"""Multiplier sequences known by hand, the state's round trip, and what the controllers refuse."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.lr import LrConfig, LrController, LrState

SMALL = LrConfig(baseline_window=4)


def run(controller: LrController, lengths: list[float], state: LrState | None = None, start: int = 0) -> list[float]:
    state = state or controller.initial_state()
    multipliers = []
    for step, length in enumerate(lengths, start):
        state, multiplier = controller.update(state, step=step, response_length=length)
        multipliers.append(multiplier)
    return multipliers


def test_the_papers_sequence_reaches_the_floor_at_the_fourth_decay() -> None:
    # 0.5^k against the floor 0.1: 1, .5, .25, .125, then .0625 < .1.
    multipliers = run(LrController(LrConfig(period=10)), [1.0] * 60)
    assert multipliers[::10] == [1.0, 0.5, 0.25, 0.125, 0.1, 0.1]
    assert multipliers == [m for m in multipliers[::10] for _ in range(10)]


def test_a_surge_at_step_110_gives_a_period_of_198() -> None:
    # The paper's Qwen3-4B: 1.8 * 110 = 198. The median of 5 sees the surge at step 112, and dates it back to 110.
    controller = LrController(LrConfig())
    state, got = controller.initial_state(), []
    for step in range(900):
        state, multiplier = controller.update(state, step=step, response_length=1000.0 if step < 110 else 3500.0)
        got.append(multiplier)
    assert (state.surge_step, state.found_step, controller.period(state), state.triggers) == (110, 112, 198, 1)
    assert got == [max(0.5 ** (step // 198), 0.1) for step in range(900)]
    assert controller.metrics(state) == {
        "lr_multiplier": 0.1,
        "lr_surges": 1.0,
        "lr_surge_step": 110.0,
        "lr_period": 198.0,
        "lr_surge_threshold": 2000.0,
    }


def test_the_period_is_rounded_not_cut_off() -> None:
    # 1.8 n = 9 n / 5 is never halfway between integers, and cutting it off is one less for two n in five.
    controller = LrController(SMALL)
    state = controller.initial_state()
    periods = [controller.period(dataclasses.replace(state, surge_step=n)) for n in range(5, 405)]
    assert periods == [(9 * n + 2) // 5 for n in range(5, 405)]
    assert sum(period != int(1.8 * n) for n, period in enumerate(periods, 5)) == 160


def test_where_the_count_starts() -> None:
    # Surge at step 10: period 18. First decay 18 after the end of warm-up, the second 18 later.
    for config, warmup, first in (
        (SMALL, 4, 22),
        (SMALL, 0, 18),
        (LrConfig(baseline_window=4, warmup_steps=7), 4, 25),
    ):
        got = run(LrController(config, warmup_steps=warmup), [100.0] * 10 + [400.0] * 50)
        assert [step for step in range(1, 60) if got[step] != got[step - 1]][:2] == [first, first + 18], config


def test_a_given_period_needs_no_statistics() -> None:
    controller = LrController(LrConfig(period=3, decay=0.2, floor=0.05))
    state, got = controller.initial_state(), []
    for step in range(8):
        state, multiplier = controller.update(state, step=step)
        got.append(multiplier)
    assert got == [1, 1, 1, 0.2, 0.2, 0.2, 0.05, 0.05]


def test_a_surge_is_dated_back_to_its_first_large_measurement() -> None:
    controller = LrController(LrConfig(baseline_window=5))
    state = controller.initial_state()
    for step, length in enumerate([9.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0]):
        state, _ = controller.update(state, step=step, response_length=length)
    # The median of 1 1 9 9 9 is 9; of 1 1 1 9 9 it was 1.
    assert (state.surge_step, state.found_step) == (4, 6)
    # A host that measures at step 0 only cannot make a period of 0.
    assert controller.period(dataclasses.replace(state, surge_step=0)) == 1


@pytest.mark.parametrize(
    ("trigger", "low", "high", "nothing"),
    [
        ("response_length", 300.0, 900.0, 500.0),
        ("mismatch_kl", 4e-4, 3e-3, 9e-4),  # more than doubles, but is healthy below 1e-3
        ("grad_norm", 0.2, 0.9, 0.39),
        ("f_tau", 0.0, 0.02, 0.009),
    ],
)
def test_every_trigger_drives_the_rule(trigger: Any, low: float, high: float, nothing: float) -> None:
    controller = LrController(LrConfig(trigger=trigger, baseline_window=4))
    for after, surges in ((high, 1), (nothing, 0)):
        state = controller.initial_state()
        for step in range(30):
            state, multiplier = controller.update(state, step=step, **{trigger: low if step < 10 else after})
        assert state.triggers == surges
        assert multiplier == (0.5 if surges else 1.0)  # period 18: step 29 is in the second


def test_a_step_is_measured_once_and_an_empty_batch_not_at_all() -> None:
    controller = LrController(SMALL)
    state, _ = controller.update(controller.initial_state(), step=0, response_length=100.0)
    assert controller.update(state, step=0, response_length=900.0)[0] == state
    empty, _ = controller.update(state, step=1, responses=0, response_length=math.nan)
    assert empty == controller.advance(state, step=1)[0] and empty.surge == state.surge
    # An empty batch first and a full one later at the same step: the full one counts.
    full, _ = controller.update(empty, step=1, responses=8, response_length=100.0)
    assert len(full.surge.history) == 2


def test_steps_may_be_left_out_but_never_go_back() -> None:
    controller = LrController(SMALL)
    state = controller.initial_state()
    for step in range(0, 80, 4):  # four optimizer steps per batch
        state, multiplier = controller.update(state, step=step, response_length=100.0 if step < 40 else 400.0)
    assert (state.surge_step, controller.period(state), multiplier) == (40, 72, 0.5)
    with pytest.raises(RecordError, match="step 75 comes after step 76; .* Load the state"):
        controller.update(state, step=75, response_length=1.0)
    with pytest.raises(
        RecordError, match=r"first step of a new state of .* is 500; load the state .*`initial_state\(500\)"
    ):
        controller.update(controller.initial_state(), step=500, response_length=1.0)
    assert controller.advance(controller.initial_state(500), step=500)[1] == 1.0
    assert controller.advance(controller.initial_state(), step=1)[1] == 1.0  # hosts that count from 1
    for wrong in (-1, 1.5, True, "3"):
        with pytest.raises(RecordError, match="step="):
            controller.advance(controller.initial_state(), step=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["response_length", "truncated_fraction", "mismatch_kl", "grad_norm", "f_tau"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, "long"])
def test_a_broken_statistic_is_named_even_if_it_is_not_the_trigger(name: str, value: float) -> None:
    controller = LrController(LrConfig())
    with pytest.raises(RecordError, match=f"step 0: {name}="):
        controller.update(controller.initial_state(), step=0, **{"response_length": 1.0, name: value})


def test_what_is_missing_or_too_large_is_named() -> None:
    controller = LrController(LrConfig(trigger="mismatch_kl"))
    start = controller.initial_state()
    with pytest.raises(RecordError, match="step 0: mismatch_kl is missing"):
        controller.update(start, step=0, response_length=100.0)
    with pytest.raises(RecordError, match="f_tau=1.5 .* 0 <= x <= 1"):
        controller.update(start, step=0, mismatch_kl=0.1, f_tau=1.5)
    with pytest.raises(RecordError, match="responses=-1"):
        controller.update(start, step=0, mismatch_kl=0.1, responses=-1)


CONFIGS = [SMALL, LrConfig(period=7)]


@settings(deadline=None, max_examples=60)
@given(
    config=st.sampled_from(CONFIGS),
    lengths=st.lists(st.floats(1, 1000), min_size=2, max_size=80),
    stops=st.sets(st.integers(0, 79)),
    skipped=st.sets(st.integers(0, 79)),
)
def test_stopping_anywhere_changes_nothing(
    config: LrConfig, lengths: list[float], stops: set[int], skipped: set[int]
) -> None:
    whole, resumed = LrController(config), LrController(config)
    one, other = whole.initial_state(), resumed.initial_state()
    step = 0
    for k, length in enumerate(lengths):
        values = {"step": step, "response_length": length, "truncated_fraction": 1 / length}
        one, wanted = whole.update(one, **values)
        if k in stops:  # killed before the step: the state of the last checkpoint, a new process
            resumed = LrController(config)
            other = LrState.from_dict(json.loads(json.dumps(other.to_dict(), allow_nan=False)))
        other, got = resumed.update(other, **values)
        assert (other, got) == (one, wanted)
        step += k not in skipped  # float16 gradients overflowed
    assert len(json.dumps(one.to_dict())) < 2000  # no growth with the run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2; this release reads version 1. Resume with the release"),
        ({"version": None}, "version None"),
        ({"extra": 1}, "unknown 'extra'.*resume from another checkpoint"),
        ({"surge": {}}, "surge .*missing 'baseline'"),
        ({"surge": 3}, "surge=3; expected a mapping"),
        ({"step": -2}, "step=-2; expected an integer >= -1"),
        ({"step": None}, "step=None"),
        ({"triggers": 1.5}, "triggers=1.5"),
        ({"trigger": "cosine"}, "trigger='cosine'; expected response_length or mismatch_kl"),
    ],
)
def test_a_state_that_nobody_saved_is_refused(change: dict[str, Any], message: str) -> None:
    good = LrController(LrConfig()).initial_state().to_dict()
    with pytest.raises(RecordError, match=message):
        LrState.from_dict({**good, **change})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("history", 3),
        ("history", [[1, 2.0]]),
        ("history", [[1, math.nan, None]]),
        ("history", [["a", 1.0, None]]),
        ("baseline", {"center": -1.0, "spread": 0.0}),
        ("baseline", {"center": 1.0}),
        ("truncated_baseline", 0.5),
    ],
)
def test_a_damaged_detector_is_refused(key: str, value: Any) -> None:
    data = LrController(LrConfig()).initial_state().to_dict()
    data["surge"][key] = value
    with pytest.raises(RecordError, match=f"surge.{key}"):
        LrState.from_dict(data)


def test_a_missing_key_and_another_controllers_state_are_refused() -> None:
    data = LrController(LrConfig()).initial_state().to_dict()
    del data["triggers"]
    with pytest.raises(RecordError, match="missing 'triggers'"):
        LrState.from_dict(data)
    state = LrController(LrConfig()).initial_state()
    with pytest.raises(RecordError, match="trigger 'response_length', the controller .* trigger 'grad_norm'"):
        LrController(LrConfig(trigger="grad_norm")).update(state, step=0, grad_norm=1.0)


def test_settings_may_change_on_resume() -> None:
    # The surge stays, the rule's numbers are the new ones.
    state = dataclasses.replace(LrController(LrConfig()).initial_state(), step=199, surge_step=100)
    assert LrController(LrConfig(decay=0.2)).multiplier(state) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"period": 0}, "mismatch.lr.period: 0"),
        ({"decay": 1.0}, "mismatch.lr.decay: 1.0"),
        ({"floor": 0.0}, "mismatch.lr.floor: 0.0"),
        ({"warmup_steps": -1}, "mismatch.lr.warmup_steps"),
        ({"period": 3, "trigger": "f_tau"}, "trigger: 'f_tau' has no effect with period=3"),
        ({"period": 3, "surge_ratio": 3.0}, "mismatch.lr.surge_ratio: 3.0 has no effect with period=3"),
        ({"surge_ratio": 1.0}, "mismatch.lr.surge_ratio"),
        ({"baseline_window": 0}, "mismatch.lr.baseline_window"),
        ({"triger": "f_tau"}, "Did you mean 'trigger'"),
    ],
)
def test_the_section_refuses(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LrConfig(**block)


def test_the_section_is_built_from_plain_data() -> None:
    block = {"trigger": "mismatch_kl", "surge_ratio": 3}
    config = LrConfig(**block)
    assert config.surge_ratio == 3.0
    assert LrConfig(**dataclasses.asdict(config)) == config
    assert LrConfig(**dataclasses.asdict(LrConfig(period=5))) == LrConfig(period=5)
