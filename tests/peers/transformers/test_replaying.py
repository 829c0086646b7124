"""A trainer's replay in your own loop: what is refused, on one rank and on all, what is measured and what is counted."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.transformers import routing as backend
from torch import Tensor

from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import RecordError, RoutingError
from mismatch_ext.ranks import OneProcess
from mismatch_ext.routing import OTHER_PASSES, RoutingTrace
from mismatch_ext.routing.replay import REFERENCE, RouteReplay
from tests.peers.conformance.routes import FAULTS
from tests.peers.transformers.test_plausible import engine, traced


class Two(OneProcess):
    """The first of two ranks; the other has an error, or has told these of its passes to lack routes, or measured the same."""

    size = 2

    def __init__(self, *lacks: bool, words: tuple[str, str] | None = None) -> None:
        self.lacks, self.words, self.asked = list(lacks), words, 0

    def gather(self, value: Any) -> list[Any]:
        self.asked += 1
        return [value, self.words]

    def sum(self, values: Tensor) -> Tensor:
        self.asked += 1
        if self.words is not None:
            return values + 1
        if self.lacks:
            return values + torch.tensor([0.0, float(self.lacks.pop(0))])
        return values + values


def replay_of(rate: float = 1.0, seed: int = 0, **options: Any) -> RouteReplay:
    return RouteReplay(RoutingConfig(mode="R3", measured=rate), backend, engine()[0], seed=seed, **options)


def run(replay: RouteReplay, trace: RoutingTrace, split: str = "train", ids: Tensor | None = None) -> None:
    """Run the pass of a trace's tokens, and another one where ids are given."""
    model, own = engine()[:2]
    every = torch.ones(trace.rows, dtype=torch.bool)
    with torch.no_grad(), replay.replaying(model, trace, every, real=every, split=split):
        model(input_ids=own, use_cache=False)
        if ids is not None:
            model(input_ids=ids, use_cache=False)


def test_the_first_pass_is_checked_whatever_is_drawn() -> None:
    trace = engine()[3]
    wrong = traced(trace, FAULTS["layers reversed"][0](trace.experts.to(torch.int64)))
    replay = replay_of(rate=0.0)
    run(replay, wrong, REFERENCE)  # another model's choice says nothing
    with pytest.raises(RoutingError, match="layers are swapped"):
        run(replay, wrong)
    run(replay, trace)
    run(replay, wrong)  # once: the agreement shows what follows
    assert replay.take_agreement("train") == {} and replay.forwards == 4


def test_ranks_refuse_together() -> None:
    trace = engine()[3]
    with pytest.raises(RoutingError, match="rank 1: no good"):
        run(replay_of(ranks=Two(words=("RoutingError", "no good"))), trace)
    wrong = traced(trace, FAULTS["rows late"][0](trace.experts.to(torch.int64)))
    waiting = replay_of(ranks=Two(True, False))
    run(waiting, trace)
    with pytest.raises(RoutingError, match="shifted by one"):  # a rank without routes has checked nothing yet
        run(waiting, wrong)


def test_what_was_measured_is_told_once_by_split() -> None:
    _, ids, _, trace = engine()
    replay = replay_of()
    run(replay, trace, ids=(ids + 1) % 64)
    run(replay, trace, REFERENCE, ids=(ids + 1) % 64)
    run(replay, trace, "eval/default")
    found = replay.take_agreement("train", Two())  # of two ranks that have measured the same
    assert found["routing/compared_tokens"] == 2 * trace.rows
    differing = [found[f"routing/layer_{layer}_set_mismatch"] for layer in trace.layers]
    assert differing == [1.0, *[0.0] * (len(trace.layers) - 1)]
    assert replay.take_agreement("train") == {} and replay.take_agreement("eval/default") != {}
    assert replay.take_others("train") == {OTHER_PASSES: 2.0} and replay.take_others("train") == {OTHER_PASSES: 0.0}
    replay.others["train"] = 3
    assert replay.take_others("train", Two(), sharing=2) == {OTHER_PASSES: 3.0}  # of two ranks with as many


def test_a_saved_choice_goes_on_and_a_damaged_one_is_refused() -> None:
    wanted = [random.Random(f"5/{number}").random() < 0.5 for number in range(1, 21)]
    assert 0 < sum(wanted) < 20
    replay = replay_of(rate=0.5, seed=5)
    assert [replay.draws.agreement() for _ in range(10)] == wanted[:10]
    again = replay_of(rate=0.5, seed=5)
    again.load_state_dict(json.loads(json.dumps(replay.state_dict())))
    for state, why in (
        ({"made": "x"}, "a valid integer"),
        ({"made": -1}, "greater than"),
        ({"random": 3}, "Unexpected"),
    ):
        with pytest.raises(RecordError, match=f"routing.{next(iter(state))}: .*{why}"):
            again.load_state_dict(state)
    assert [again.draws.agreement() for _ in range(10)] == wanted[10:]
