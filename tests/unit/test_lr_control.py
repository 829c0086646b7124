"""The multiplier on torch optimizers: what is applied, what is reported, what a checkpoint holds."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as lrs

from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.lr import LrConfig, LrControl, LrController
from mismatch_ext.precision.scaler import LossScaler

EVERY_5 = LrConfig(period=5)
SURGE = LrConfig(baseline_window=4, warmup_steps=3)


def warmup_cosine(optimizer: Optimizer) -> Any:
    warmup = lrs.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    return lrs.SequentialLR(optimizer, [warmup, lrs.CosineAnnealingLR(optimizer, T_max=30)], milestones=[3])


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lrs.LambdaLR(o, [lambda k: min(k / 3, 1.0), lambda k: 0.97**k]),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, T_max=12),
    "one_cycle": lambda o: lrs.OneCycleLR(o, max_lr=[0.5, 0.1], total_steps=40, cycle_momentum=False),
    "constant": lambda o: lrs.ConstantLR(o, factor=0.5, total_iters=7),
    "exponential": lambda o: lrs.ExponentialLR(o, gamma=0.9),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda k: 0.95),
    "polynomial": lambda o: lrs.PolynomialLR(o, total_iters=20, power=2.0),
    "sequential": warmup_cosine,
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1, 4), lrs.ExponentialLR(o, 0.9)]),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=6),
    "cyclic": lambda o: lrs.CyclicLR(o, base_lr=[0.01, 0.02], max_lr=[0.1, 0.2], step_size_up=4, cycle_momentum=False),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=1),
}


def model(tensor: bool = False) -> tuple[list[torch.nn.Parameter], SGD]:
    """Two groups of one parameter each: one step of SGD at gradient 1 moves a parameter by its learning rate."""
    weights = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
    rates = [torch.tensor(r, dtype=torch.float64) if tensor else r for r in (0.4, 0.08)]
    return weights, SGD([{"params": [w], "lr": r} for w, r in zip(weights, rates, strict=True)], lr=1.0)  # type: ignore[arg-type]


def step_of(weights: list[torch.nn.Parameter], optimizer: Any) -> list[float]:
    """Take a step at gradient 1 and return by how much each weight moved: the rate that was applied."""
    before = [w.item() for w in weights]
    for w in weights:
        w.grad = torch.ones_like(w)
    optimizer.step()
    return [b - w.item() for b, w in zip(before, weights, strict=True)]


def schedule(scheduler: Any, k: int) -> None:
    scheduler.step(1.0 + k) if isinstance(scheduler, lrs.ReduceLROnPlateau) else scheduler.step()


def stock(kind: str, steps: int) -> list[list[float]]:
    """Return the rates of a run without control."""
    weights, optimizer = model()
    scheduler, rates = SCHEDULES[kind](optimizer), []
    for k in range(steps):
        rates.append(step_of(weights, optimizer))
        schedule(scheduler, k)
    return rates


def near(rates: Any, multiplier: float = 1.0) -> Any:
    return pytest.approx([float(r) * multiplier for r in rates], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_is_multiplied_and_never_compounded(kind: str, known: bool) -> None:
    base = stock(kind, 30)
    weights, optimizer = model()
    scheduler = SCHEDULES[kind](optimizer)
    control = LrControl(optimizer, LrController(EVERY_5), scheduler=scheduler if known else None)
    for k in range(30):
        multiplier = max(0.5 ** (k // 5), 0.1)
        assert control.multiplier == multiplier
        assert step_of(weights, optimizer) == near(base[k], multiplier)
        assert [g["lr"] for g in optimizer.param_groups] == near(base[k])
        if known:
            # Logged before the scheduler moves on, as transformers does: what was applied.
            assert scheduler.get_last_lr() == near(base[k], multiplier)
            assert control.get_last_lr() == near(base[k], multiplier)
            assert control.metrics() == {"lr_multiplier": multiplier, "lr_surges": 0.0, "lr_period": 5.0}
        schedule(scheduler, k)
        if known and k < 29:
            # Logged after: what the next step will apply.
            assert scheduler.get_last_lr() == near(base[k + 1], max(0.5 ** ((k + 1) // 5), 0.1))


def test_warmup_is_not_run_again_when_the_surge_is_found() -> None:
    # Surge at step 10: period 18, counted from the end of warm-up at 3: halved at 21. Until then the run is stock to the bit.
    base = stock("sequential", 40)
    weights, optimizer = model()
    scheduler = SCHEDULES["sequential"](optimizer)
    control = LrControl(optimizer, LrController(SURGE), scheduler=scheduler)
    for k in range(40):
        control.update(response_length=100.0 if k < 10 else 350.0)
        moved = step_of(weights, optimizer)
        assert moved == base[k] if k < 21 else moved == near(base[k], 0.5 if k < 39 else 0.25)
        scheduler.step()
    assert scheduler.last_epoch == 40


def test_without_a_scheduler_rates_written_by_hand_are_multiplied() -> None:
    weights, optimizer = model()
    control = LrControl(optimizer, LrController(LrConfig(period=2)))
    for k in range(8):
        optimizer.param_groups[0]["lr"] = 1.0 / (k + 1)
        assert step_of(weights, optimizer) == near([1.0 / (k + 1), 0.08], max(0.5 ** (k // 2), 0.1))
        assert control.get_last_lr() == near([1.0 / (k + 1), 0.08], max(0.5 ** (k // 2), 0.1))


def test_a_group_added_later_is_multiplied_too() -> None:
    weights, optimizer = model()
    LrControl(optimizer, LrController(LrConfig(period=1)))
    step_of(weights, optimizer)
    weights.append(torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    optimizer.add_param_group({"params": [weights[-1]], "lr": 3.0})
    assert step_of(weights, optimizer) == near([0.2, 0.04, 1.5])


def test_rates_that_are_tensors_even_one_shared_by_the_groups() -> None:
    weights, optimizer = model(tensor=True)
    rate = torch.tensor(0.4, dtype=torch.float64)
    for group in optimizer.param_groups:
        group["lr"] = rate
    LrControl(optimizer, LrController(LrConfig(period=1, decay=0.25, floor=0.25)))
    assert [step_of(weights, optimizer) for _ in range(3)] == [near([0.4, 0.4]), near([0.1, 0.1]), near([0.1, 0.1])]
    assert all(group["lr"] is rate for group in optimizer.param_groups) and rate.item() == 0.4


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, LossScaler])
def test_a_step_that_the_scaler_skips_does_not_count(scaler_class: Any, fused: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = AdamW([weight], lr=0.1, fused=fused)
    scaler = scaler_class("cpu", init_scale=64.0)
    control = LrControl(optimizer, LrController(LrConfig(period=2)))
    counted = []
    for overflow in (True, False, True, True, False, False, False):
        scaler.scale(weight.sum() * (float("inf") if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        counted.append((control.state.step, control.multiplier))
    assert counted == [(0, 1), (1, 1), (1, 1), (1, 1), (2, 0.5), (3, 0.5), (4, 0.25)]


def test_accumulation_and_a_skipped_step_under_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    base = stock("sequential", 10)
    weights, optimizer = model()
    scheduler = SCHEDULES["sequential"](optimizer)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    wrapped, wrapped_schedule = accelerator.prepare(optimizer, scheduler)
    control = LrControl(wrapped, LrController(LrConfig(period=2)), scheduler=wrapped_schedule)
    applied = []
    for micro in range(20):
        accelerator.gradient_state._set_sync_gradients(micro % 2 == 1)
        moved = step_of(weights, wrapped)
        if micro % 2:
            applied.append(moved)
            assert wrapped_schedule.get_last_lr() == near(moved)
        else:
            assert moved == [0.0, 0.0]
        wrapped_schedule.step()
    assert applied == [near(rates, max(0.5 ** (k // 2), 0.1)) for k, rates in enumerate(base)]
    assert control.state.step == 10
    # float16: accelerate drives the scaler and exchanges `optimizer.step` while it does.
    weights, optimizer = model()
    wrapped = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    control = LrControl(wrapped, LrController(LrConfig(period=1)))
    accelerator.gradient_state._set_sync_gradients(True)
    moves = []
    for gradient in (1.0, float("inf"), 1.0):
        before = weights[0].item()
        for w in weights:
            w.grad = torch.full_like(w, gradient) * wrapped.scaler.get_scale()
        wrapped.scaler.scale(torch.zeros(1))
        wrapped.step()
        moves.append((before - weights[0].item(), wrapped.step_was_skipped))
    assert moves == [(pytest.approx(0.4), False), (0.0, True), (pytest.approx(0.2), False)]


class Wrapper:
    """As DeepSpeed's optimizers: no torch optimizer itself, and steps the inner one group by group."""

    def __init__(self, optimizer: SGD, *, by_group: bool = False) -> None:
        self.optimizer, self.by_group = optimizer, by_group

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        if not self.by_group:
            self.optimizer.step()
            return
        groups = self.optimizer.param_groups
        for group in groups:
            self.optimizer.param_groups = [group]
            self.optimizer.step()
        self.optimizer.param_groups = groups


def test_a_deepspeed_style_wrapper() -> None:
    weights, optimizer = model()
    with pytest.raises(ConfigError, match="count_steps: Wrapper may step its inner SGD several times"):
        LrControl(Wrapper(optimizer), LrController(EVERY_5))
    control = LrControl(Wrapper(optimizer), LrController(LrConfig(period=1)), count_steps=True)
    assert [step_of(weights, Wrapper(optimizer)) for _ in range(2)] == [near([0.4, 0.08]), near([0.2, 0.04])]
    with pytest.raises(ConfigError, match="stepped with 1 of its 2 parameter groups .* count_steps=False"):
        Wrapper(optimizer, by_group=True).step()
    control.remove()

    weights, optimizer = model()
    wrapper = Wrapper(optimizer, by_group=True)
    control = LrControl(wrapper, LrController(LrConfig(period=1)), count_steps=False)
    for step in range(6):
        assert control.advance(step=step) == max(0.5**step, 0.1)
        assert step_of(weights, wrapper) == near([0.4, 0.08], max(0.5**step, 0.1))
    assert [g["lr"] for g in optimizer.param_groups] == [0.4, 0.08]
    with pytest.raises(RecordError, match="step=None with count_steps=False"):
        control.update(response_length=1.0)
    with pytest.raises(RecordError, match="first step of a new state"):
        LrControl(Wrapper(model()[1]), LrController(EVERY_5), count_steps=False).advance(step=30)


def test_what_holds_no_torch_optimizer_or_scheduler_is_refused() -> None:
    with pytest.raises(ConfigError, match="found object inside object, which is no torch.optim.Optimizer"):
        LrControl(object(), LrController(EVERY_5))
    with pytest.raises(ConfigError, match="scheduler: dict has no get_last_lr"):
        LrControl(model()[1], LrController(EVERY_5), scheduler={})
    optimizer = model()[1]
    control = LrControl(optimizer, LrController(EVERY_5))
    with pytest.raises(ConfigError, match="SGD has a learning-rate control already"):
        LrControl(optimizer, LrController(EVERY_5))
    with pytest.raises(RecordError, match="step=3 with count_steps=True"):
        control.update(step=3)
    control.remove()
    LrControl(optimizer, LrController(EVERY_5))


class Inner(SGD):
    """Its `step` calls its parent's, so torch runs the hooks of both."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_optimizer_whose_step_calls_its_parents_is_multiplied_and_counted_once() -> None:
    model()[1].step()  # torch hooks a class when it is first made: SGD's own step too
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer, calls = Inner([weight], lr=1.0), []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    control = LrControl(optimizer, LrController(LrConfig(period=1, decay=0.5, floor=0.1)))
    assert [step_of([weight], optimizer)[0] for _ in range(5)] == [1.0, 0.5, 0.25, 0.125, pytest.approx(0.1)]
    assert len(calls) == 10
    assert control.state.step == 5 and optimizer.param_groups[0]["lr"] == 1.0


class Failing(SGD):
    """Its `step` can run out of memory."""

    fail = False

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise torch.OutOfMemoryError("no memory")
        return super().step(closure)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_step_that_raises_leaves_no_multiplied_rate_behind(known: bool, late: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Failing([weight], lr=1.0)
    schedule = None if late else lrs.ExponentialLR(optimizer, gamma=0.5)  # torch's schedules wrap `step` too
    controller = LrController(LrConfig(period=1))
    control = LrControl(optimizer, controller, scheduler=schedule if known else None)
    schedule = schedule or lrs.ExponentialLR(optimizer, gamma=0.5)
    step_of([weight], optimizer)
    optimizer.fail = True
    with pytest.raises(torch.OutOfMemoryError):
        step_of([weight], optimizer)
    optimizer.fail = False
    assert optimizer.param_groups[0]["lr"] == 1.0
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert step_of([weight], optimizer) == [0.25] and control.state.step == 2
    control.remove()
    assert step_of([weight], optimizer) == [0.5]


def test_a_checkpoint_is_one_of_a_stock_run() -> None:
    def trained(controlled: bool) -> tuple[Any, Any]:
        weights, optimizer = model()
        scheduler = SCHEDULES["sequential"](optimizer)
        if controlled:
            LrControl(optimizer, LrController(LrConfig(period=2)), scheduler=scheduler)
        for _ in range(9):
            step_of(weights, optimizer)
            scheduler.step()
        return optimizer, scheduler

    (ours, our_schedule), (plain, plain_schedule) = trained(True), trained(False)
    assert ours.state_dict() == plain.state_dict()
    assert our_schedule.state_dict() == plain_schedule.state_dict()
    assert isinstance(our_schedule, lrs.SequentialLR) and type(our_schedule).__name__ == "SequentialLR"
    # Copies, as by multiprocessing or EMA code, are stock objects and do not drag the control along.
    simple = lrs.CosineAnnealingLR(ours, T_max=5)
    for copied in (pickle.loads(pickle.dumps(simple)), copy.deepcopy(our_schedule), pickle.loads(pickle.dumps(ours))):
        assert type(copied).__module__.startswith("torch.optim")
    other, last = model(), copy.deepcopy(our_schedule)
    assert type(last) is lrs.SequentialLR and last.get_last_lr() == plain_schedule.get_last_lr()
    # Loaded without control, the run goes on at the stock rate.
    scheduler = SCHEDULES["sequential"](other[1])
    other[1].load_state_dict(ours.state_dict())
    scheduler.load_state_dict(our_schedule.state_dict())
    assert step_of(other[0], other[1]) == near(stock("sequential", 10)[9])


@pytest.mark.parametrize("order", ["control first", "control last"])
@pytest.mark.parametrize("kind", ["sequential", "chained", "lambda", "cosine", "plateau"])
def test_a_resumed_run_applies_the_same_rates(kind: str, order: str) -> None:
    def build() -> tuple[Any, Any, Any, LrControl]:
        weights, optimizer = model()
        scheduler = SCHEDULES[kind](optimizer)
        return weights, optimizer, scheduler, LrControl(optimizer, LrController(SURGE), scheduler=scheduler)

    def train(run: Any, first: int, last: int) -> list[Any]:
        weights, optimizer, scheduler, control = run
        seen = []
        for k in range(first, last):
            control.update(response_length=100.0 if k < 8 else 350.0)
            seen.append((step_of(weights, optimizer), scheduler.get_last_lr()))
            schedule(scheduler, k)
        return seen

    whole = train(build(), 0, 60)
    run, parts = build(), []
    for first, last in ((0, 6), (6, 9), (9, 25), (25, 60)):  # before the surge, within its smoothing, in a period
        parts += train(run, first, last)
        saved = [
            json.dumps(run[3].state_dict()),
            copy.deepcopy(run[1].state_dict()),
            copy.deepcopy(run[2].state_dict()),
        ]
        resumed = build()
        weights, optimizer, scheduler, control = resumed
        for w, old in zip(weights, run[0], strict=True):
            w.data.copy_(old.data)
        if order == "control first":
            control.load_state_dict(json.loads(saved[0]))
        optimizer.load_state_dict(saved[1])
        scheduler.load_state_dict(saved[2])
        if order == "control last":
            control.load_state_dict(json.loads(saved[0]))
        assert scheduler.get_last_lr() == near(run[2].get_last_lr())
        run = resumed
    assert [moved for moved, _ in parts] == [moved for moved, _ in whole]
    assert [logged for _, logged in parts] == [logged for _, logged in whole]
    assert whole[59][0] != whole[15][0]  # decays were among them


def test_resuming_without_the_controls_state_is_refused() -> None:
    weights, optimizer = model()
    scheduler = SCHEDULES["cosine"](optimizer)
    for _ in range(7):
        step_of(weights, optimizer)
        scheduler.step()
    control = LrControl(optimizer, LrController(SURGE), scheduler=scheduler)
    with pytest.raises(RecordError, match=r"schedule stands at 7, .* load the state .* LrControl\(\.\.\., step=7\)"):
        step_of(weights, optimizer)
    control.remove()
    joined = LrControl(optimizer, LrController(EVERY_5), scheduler=scheduler, step=7)
    assert joined.multiplier == 0.5
    assert scheduler.get_last_lr() == near([g["lr"] for g in optimizer.param_groups], 0.5)
    step_of(weights, optimizer)
    assert joined.state.step == 8


def test_the_step_by_which_torch_makes_an_optimizers_state_does_not_count() -> None:
    weight = torch.nn.Linear(2, 2)
    optimizer = AdamW(weight.parameters(), lr=0.1)
    control = LrControl(optimizer, LrController(LrConfig(period=1)))
    saved = get_optimizer_state_dict(weight, optimizer)
    assert optimizer.state and control.state.step == 0 and optimizer.param_groups[0]["lr"] == 0.1
    assert saved["param_groups"][0]["lr"] == 0.1  # type: ignore[index]
    # A first step at rate 0, as warm-up has it, does count.
    optimizer = SGD(weight.parameters(), lr=0.0)
    control = LrControl(optimizer, LrController(LrConfig(period=1)))
    optimizer.step()
    assert control.state.step == 1


def test_the_reported_rate_waits_for_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mismatch_ext.lr.controller.PERIOD_FACTOR", 1.0)
    # Found between a step and the scheduler's: what is logged is still what that step applied.
    weights, optimizer = model()
    scheduler = SCHEDULES["exponential"](optimizer)
    control = LrControl(optimizer, LrController(LrConfig(baseline_window=2)), scheduler=scheduler)
    for _ in range(3):
        control.update(response_length=10.0)
        applied = step_of(weights, optimizer)
        assert scheduler.get_last_lr() == near(applied)
        if control.state.step < 3:
            scheduler.step()
    assert control.update(response_length=90.0) == 0.5
    assert scheduler.get_last_lr() == near(applied)
    assert control.get_last_lr() == near(applied)
    scheduler.step()
    assert scheduler.get_last_lr() == near(applied, 0.9 * 0.5)
    assert step_of(weights, optimizer) == near(applied, 0.9 * 0.5)


def test_removing_gives_back_a_stock_optimizer_and_scheduler() -> None:
    weights, optimizer = model()
    scheduler = SCHEDULES["cosine"](optimizer)
    step_of(weights, optimizer)
    before = set(vars(optimizer)), type(scheduler)
    control = LrControl(optimizer, LrController(LrConfig(period=1)), scheduler=scheduler)
    step_of(weights, optimizer)
    scheduler.step()
    assert control.multiplier == 0.5
    assert scheduler.get_last_lr() != [g["lr"] for g in optimizer.param_groups]
    control.remove()
    assert (set(vars(optimizer)), type(scheduler)) == before
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert scheduler.get_last_lr() == [g["lr"] for g in optimizer.param_groups]
    assert step_of(weights, optimizer) == near(scheduler.get_last_lr())
