"""Which scale of the gap an alarm should read: false and missed alarms in nats, in log-odds, and by a robust k3.

    python -m benchmarks alarms --record evidence/alarms.json

Each run is 72 steps of a miniature policy, in bfloat16. Its logits are multiplied from 1 up to 4 as a policy that learns
becomes sure, or from 4 down to 1. A cached decode is the engine and samples, a full pass is the trainer. From step 32 on there
is a fault, or none. Every candidate for an alarm reads each run; it is counted as false if it is raised in a run without a fault,
and as missed if it is not raised in a run with one after its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mismatch_ext import demo
from mismatch_ext.alarms import DEFAULTS, AlarmState, Rule, watch
from mismatch_ext.demo import Policy
from mismatch_ext.gap import gap_metrics, gap_sums
from mismatch_ext.growth import Growth, grown
from mismatch_ext.names import PREFIX

STEPS, BEGINS, RESPONSES, SEEDS = 72, 32, 24, (0, 1, 2)
SHARPEST = 4.0
LESSONS = 200
"""Steps in which the policy learns the chain that its prompts come from."""
KNIFE_EDGE = 6.0
"""Log-ratio of a token at which the two sides round to different sides of a decision, nats."""
KNIFE_EDGE_EVERY = 2
"""Steps between two such tokens; in a batch of 1,536 tokens that is more often than it was measured anywhere."""

CANDIDATES = (
    Rule(metric="logp_abs_diff_mean", above=0.1),
    Rule(metric="k3_kl", above=1e-3),
    Rule(metric="k3_median", above=1e-3),
    Rule(metric="k3_median_low", above=1e-3),
    Rule(metric="log_odds_abs_diff_mean", above=0.3),
    Rule(metric="log_odds_abs_diff_mean", above=0.5),
    Rule(metric="k3_growth_low", above=2.0),
    Rule(metric="k3_median_growth_low", above=2.0),
    Rule(metric="log_odds_growth_low", above=2.0),
)
"""The default alarms of the gap, and what could stand beside them or take their place. All wait for three logs in a row."""

OF_GAP = ("logp_abs_diff_mean", "k3_kl", "k3_growth_low", "log_odds_growth_low")
"""Metrics of the default alarms that a run here can raise."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Both sides at one step, and what the engine does to its logits."""

    engine: Policy
    trainer: Policy
    penalty: float = 1.0
    knife_edge: bool = False


def chain(seed: int) -> Tensor:
    """Return the logits of a Markov chain over the policy's tokens `[V, V]`, sure after some of them and open after others."""
    draw = torch.Generator().manual_seed(seed)
    sharpness = torch.linspace(0.5, 5.0, demo.VOCABULARY)[:, None]
    return sharpness * torch.randn(demo.VOCABULARY, demo.VOCABULARY, generator=draw)


def sequences(logits: Tensor, count: int, length: int, draw: torch.Generator) -> Tensor:
    """Return sequences of a Markov chain `[B, T]`."""
    columns = [torch.randint(demo.VOCABULARY, (count, 1), generator=draw)]
    while len(columns) < length:
        columns.append(torch.multinomial(logits[columns[-1][:, 0]].softmax(-1), 1, generator=draw))
    return torch.cat(columns, 1)


def taught(seed: int) -> Policy:
    """Return a policy in float32 that has learned the chain of this seed."""
    torch.manual_seed(seed)
    logits, policy, draw = chain(seed), Policy(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(LESSONS):
        ids = sequences(logits, 32, demo.PROMPT + demo.RESPONSE, draw)
        loss = torch.nn.functional.cross_entropy(policy(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy.eval().requires_grad_(False)


def scaled(policy: Policy, scale: float) -> Policy:
    """Return a copy in float32 whose logits are multiplied, so that it is surer of its tokens."""
    copy = demo.cast(policy, torch.float32)
    copy.head.weight.data *= scale
    return copy


def as_fp8(policy: Policy) -> Policy:
    """Return a copy whose matrices are rounded to fp8 (e4m3) with a scale for each row."""
    copy = demo.cast(policy, torch.float32)
    for name, weight in copy.named_parameters():
        if weight.dim() == 2 and "embedding" not in name and "position" not in name:
            scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            weight.data = (weight / scale).to(torch.float8_e4m3fn).float() * scale
    return copy


def drifted(policy: Policy, steps: int, seed: int) -> Policy:
    """Return a copy that has been trained for some more steps, each of which moves every weight by a 500th of its spread."""
    copy = demo.cast(policy, torch.float32)
    draw = torch.Generator().manual_seed(seed)
    for weight in copy.parameters():
        walk = torch.randn(weight.shape, generator=draw)
        weight.data += walk * weight.std() * steps**0.5 / 500
    return copy


Scenario = Callable[[Policy, float, int, int], Sides]
"""From the policy, the scale of its logits, the step, and the seed."""


def _same(policy: Policy, **options: Any) -> Sides:
    return Sides(engine=policy, trainer=policy, **options)


def no_fault(policy: Policy, scale: float, step: int, seed: int) -> Sides:
    """Return sides that differ by their kernels alone."""
    return _same(scaled(policy, scale))


def knife_edge_tokens(policy: Policy, scale: float, step: int, seed: int) -> Sides:
    """Return the same, of which one token in some batches is far apart."""
    return _same(scaled(policy, scale), knife_edge=step % KNIFE_EDGE_EVERY == 0)


def fp8_engine(policy: Policy, scale: float, step: int, seed: int) -> Sides:
    """Return an engine that holds rounded weights."""
    sharp = scaled(policy, scale)
    return Sides(engine=as_fp8(sharp), trainer=sharp)


def penalty_in_the_engine(policy: Policy, scale: float, step: int, seed: int) -> Sides:
    """Return an engine that applies a repetition penalty."""
    return _same(scaled(policy, scale), penalty=demo.PENALTY)


def temperature_in_the_engine(policy: Policy, scale: float, step: int, seed: int) -> Sides:
    """Return an engine that divides its logits by .95."""
    return Sides(engine=scaled(policy, scale / 0.95), trainer=scaled(policy, scale))


def engine_without_updates(policy: Policy, scale: float, step: int, seed: int) -> Sides:
    """Return an engine that has kept its weights since the fault began."""
    sharp = scaled(policy, scale)
    return Sides(engine=sharp, trainer=drifted(sharp, step - BEGINS, seed))


def coarser_and_coarser_engine(policy: Policy, scale: float, step: int, seed: int) -> Sides:
    """Return an engine that a part of each update does not reach, a tenth of each."""
    sharp = scaled(policy, scale)
    return Sides(engine=sharp, trainer=drifted(sharp, (step - BEGINS) / 10, seed))


CLEAN: tuple[Scenario, ...] = (no_fault, knife_edge_tokens)
FAULTY: tuple[Scenario, ...] = (
    fp8_engine,
    penalty_in_the_engine,
    temperature_in_the_engine,
    engine_without_updates,
    coarser_and_coarser_engine,
)


def scale_at(step: int, *, rising: bool) -> float:
    """Return what the logits are multiplied by at a step."""
    done = step / (STEPS - 1)
    return float(SHARPEST ** (done if rising else 1 - done))


@torch.inference_mode()
def gaps(policy: Policy, scenario: Scenario, *, rising: bool, seed: int) -> Iterator[dict[str, float]]:
    """Yield the metrics of each step of a run."""
    draw = torch.Generator().manual_seed(seed)
    logits, growths = chain(seed), dict[str, Growth]()
    for step in range(STEPS):
        has_begun = step >= BEGINS or scenario in CLEAN
        sides = (scenario if has_begun else no_fault)(policy, scale_at(step, rising=rising), step, seed)
        engine, trainer = (demo.cast(side, torch.bfloat16) for side in (sides.engine, sides.trainer))
        prompts = sequences(logits, RESPONSES, demo.PROMPT, draw)
        responses, sampled = demo.rollout(engine, prompts, draw, sides.penalty)
        scored, _ = demo.score(trainer, prompts, responses)
        if sides.knife_edge:
            scored = with_knife_edge(scored, sampled, draw)
        metrics = gap_metrics(gap_sums(old=scored, rollout=sampled, mask=torch.ones_like(scored)))
        for name, gap in (
            ("k3", metrics["k3_kl"]),
            ("k3_median", metrics["k3_median"]),
            # Squared, so that it grows as k3 does, and the same floor and bound hold.
            ("log_odds", metrics.get("log_odds_abs_diff_mean", 0.0) ** 2),
        ):
            growths[name], found = grown(growths.get(name, Growth()), step, gap, name)
            metrics |= found
        yield metrics


def with_knife_edge(scored: Tensor, sampled: Tensor, draw: torch.Generator) -> Tensor:
    """Return the trainer's log-probabilities with one token raised far above the engine's: the least probable one of a row."""
    row = int(torch.randint(len(scored), (1,), generator=draw))
    changed = scored.clone()
    place = int(sampled[row].argmin())
    changed[row, place] = min(0.0, float(sampled[row, place]) + KNIFE_EDGE)
    return changed


def raised_at(candidates: Sequence[Rule], run: list[dict[str, float]]) -> list[int]:
    """Return the steps at which one of some rules is raised over a run."""
    rules = {rule.metric: Rule(metric=rule.metric, above=rule.above, logged=(rule.metric,)) for rule in candidates}
    state, steps = AlarmState(), []
    for step, metrics in enumerate(run):
        state, alarms = watch(state, metrics, rules, step)
        steps += [alarm.step for alarm in alarms if alarm.status == "raised"]
    return steps


def row(
    name: str,
    rules: Sequence[Rule],
    clean: Mapping[Any, list[dict[str, float]]],
    faulty: Mapping[Any, list[dict[str, float]]],
) -> dict[str, Any]:
    """Return what one candidate finds, or several of them together."""
    false = {run: raised_at(rules, steps) for run, steps in clean.items()}
    raised_in = {run: raised_at(rules, steps) for run, steps in faulty.items()}
    found = {run: [step for step in steps if step >= BEGINS] for run, steps in raised_in.items()}
    before = sum(any(step < BEGINS for step in steps) for steps in raised_in.values())
    delays = [steps[0] - BEGINS for steps in found.values() if steps]
    missed: dict[str, int] = {}
    for (fault, direction, _), steps in found.items():
        if not steps:
            missed[f"{fault}, {direction}"] = missed.get(f"{fault}, {direction}", 0) + 1
    raised: dict[str, int] = {}
    for (fault, direction, _), steps in false.items():
        if steps:
            raised[f"{fault}, {direction}"] = raised.get(f"{fault}, {direction}", 0) + 1
    return {
        "name": name,
        "false": sum(map(bool, false.values())),
        "of clean": len(false),
        "missed": sum(not steps for steps in found.values()),
        "of faulty": len(found),
        "before the fault": before,
        "median delay": median(delays) if delays else None,
        "false by run": raised,
        "missed by run": missed,
    }


def run() -> Iterator[dict[str, Any]]:
    """Yield how the gap of clean runs changes as the policy becomes sure, and then a row for each candidate."""
    clean: dict[Any, list[dict[str, float]]] = {}
    faulty: dict[Any, list[dict[str, float]]] = {}
    for seed in SEEDS:
        policy = taught(seed)
        for rising in (True, False):
            for scenarios, runs in ((CLEAN, clean), (FAULTY, faulty)):
                for scenario in scenarios:
                    name = scenario.__name__.replace("_", " ")
                    direction = "becomes sure" if rising else "becomes unsure"
                    runs[name, direction, seed] = list(gaps(policy, scenario, rising=rising, seed=seed))
    for (name, direction, seed), steps in [*clean.items(), *faulty.items()]:
        if seed == SEEDS[0]:
            shown = ("logp_abs_diff_mean", "k3_kl", "k3_median", "log_odds_abs_diff_mean")
            by_metric = {
                metric: [float(f"{steps[at].get(metric, 0.0):.2g}") for at in (BEGINS, STEPS - 1)] for metric in shown
            }
            yield {"name": f"{name}, {direction}", f"at step {BEGINS} and {STEPS - 1}": by_metric}
    for rule in CANDIDATES:
        yield row(f"{rule.metric} > {rule.above:g}", [rule], clean, faulty)
    defaults = [Rule(metric=name, above=DEFAULTS[PREFIX + name].above) for name in OF_GAP]
    in_nats = [rule for rule in defaults if "log_odds" not in rule.metric]
    yield row("defaults in nats", in_nats, clean, faulty)
    yield row("defaults with growth in log-odds", defaults, clean, faulty)
