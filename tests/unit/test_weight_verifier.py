"""The verifier of weight updates: both sides are real models, the engine's in another dtype and order of tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mismatch_ext.config import MonitorConfig
from mismatch_ext.errors import ConfigError, EngineError, NonFiniteLogprobError, RecordError, WeightSyncError
from mismatch_ext.events import SYNC_UNANSWERED, WEIGHT_SYNC
from mismatch_ext.precision.audit import EngineReading, TrainerReading
from mismatch_ext.sides import RolloutSide, TrainerSide
from mismatch_ext.weights import Decoded, TensorComparison, WeightVerifier, draw_probes

PROBES = draw_probes(torch.arange(64))


class Tiny(nn.Module):
    """Scores of each token after the first, by the two before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(64, 32), nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 64))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids[:, :-1])
        hidden = hidden + 0.5 * hidden.roll(1, 1)
        scores = self.mix(hidden).float().log_softmax(-1)
        return scores.gather(-1, ids[:, 1:, None]).squeeze(-1)


class Trainer(TrainerSide):
    """The side that trains."""

    def __init__(self) -> None:
        self.model = Tiny()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def reading(self) -> TrainerReading:
        raise NotImplementedError

    @torch.no_grad()
    def score(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.named_parameters()

    def train(self) -> None:
        self.optimizer.zero_grad()
        (-self.model(PROBES).mean()).backward()
        self.optimizer.step()


class Engine(RolloutSide):
    """The side that samples: a copy, whose embedding can be compared row by row."""

    captured: Tiny | None = None
    """What it decodes with, whatever it receives; None is what it received."""

    def __init__(self, model: Tiny) -> None:
        self.receive(model)

    def receive(self, model: Tiny) -> dict[str, Tensor]:
        self.model = copy.deepcopy(model).to(torch.float16)
        self.decoder = self.model if self.captured is None else self.captured
        return self.sample()

    def sample(self) -> dict[str, Tensor]:
        return {"embed.weight": self.model.embed.weight.detach().clone()}

    def reading(self) -> EngineReading:
        raise NotImplementedError

    @torch.no_grad()
    def score(self, tokens: Tensor) -> Tensor:
        return self.model(tokens.flip(0)).flip(0).double()

    @torch.no_grad()
    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Sample from the model that decodes, which is the other one's as long as nobody keeps it."""
        random, scores = torch.Generator().manual_seed(0), []
        for _ in range(count):
            last, before = self.decoder.embed(tokens[:, -1]), self.decoder.embed(tokens[:, -2])
            now = self.decoder.mix(last + 0.5 * before).float().log_softmax(-1).double()
            drawn = torch.multinomial(now.exp(), 1, generator=random)
            tokens = torch.cat([tokens, drawn], 1)
            scores.append(now.gather(1, drawn))
        return Decoded(tokens=tokens, logprobs=torch.cat(scores, 1))

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        held = self.sample()
        return [
            TensorComparison(
                name=name,
                equal=torch.equal(held[name], tensor),
                max_abs_diff=float((held[name] - tensor).abs().max()),
                matches_previous=torch.equal(held[name], before[name]) if name in before else None,
            )
            for name, tensor in sent.items()
        ]


Said = list[tuple[str, str, str]]


def started(action: str | None = "error", name: str = "") -> tuple[Trainer, Engine, WeightVerifier, Said]:
    said: Said = []
    trainer = Trainer()
    engine = Engine(trainer.model)
    monitor = MonitorConfig(weight_sync=action)
    verifier = WeightVerifier(
        trainer, engine, monitor, PROBES, dtype="float16", event=lambda *event: said.append(event), name=name
    )
    verifier.begin()
    return trainer, engine, verifier, said


def test_weights_that_stand_still_are_said_once() -> None:
    trainer, engine, verifier, said = started()
    for stepped in (False, True, False, True, False):
        verifier.verify(engine.sample(), stepped=stepped)
    assert said == []
    for _ in range(4):
        verifier.verify(engine.sample())
    trainer.train()
    verifier.verify(engine.receive(trainer.model))
    for _ in range(3):
        verifier.verify(engine.sample())
    assert [event for _, event, _ in said] == ["weights_still", "weights_moving", "weights_still"]


def test_a_good_update_is_in_sync_and_says_nothing() -> None:
    trainer, engine, verifier, said = started()
    assert verifier.verdict is None and not verifier.moved()
    assert verifier.verify(engine.sample()).status == "unchanged"
    for _ in range(4):
        trainer.train()
        assert verifier.moved()
        assert verifier.verify(engine.receive(trainer.model)).status == "in_sync"
        assert not verifier.moved()
    assert verifier.verdict is not None and "1 tensors are equal bit by bit" in verifier.verdict.message
    assert said == []


@pytest.mark.parametrize(("tokens", "status"), [(2, "in_sync"), (3, "garbled")])
def test_a_probe_token_that_took_another_expert_is_no_sign_of_wrong_weights(tokens: int, status: str) -> None:
    trainer, engine, verifier, _ = started("warn")
    trainer.train()
    sent, score = engine.receive(trainer.model), engine.score

    def flipped(rows: Tensor) -> Tensor:
        scores = score(rows)
        scores[0, :tokens] += 20.0  # of 248 probe tokens
        return scores

    engine.score = flipped  # type: ignore[method-assign]
    verdict = verifier.verify(sent)
    assert verdict.status == status and verdict.gap_max > 19, verdict.message


@pytest.mark.parametrize("action", [None, "error", "warn"])
def test_an_engine_that_was_not_updated_twice_is_an_error_unless_that_is_to_warn(action: str | None) -> None:
    trainer, _, verifier, said = started(action, "rollout server 1")
    for _ in range(10):
        trainer.train()
    first = verifier.verify()
    assert first is not None and first.status == "stale" and not first.clear
    for _ in range(10):
        trainer.train()
    with nullcontext() if action == "warn" else pytest.raises(WeightSyncError, match="stale"):
        verifier.verify()
    assert [event[:2] for event in said] == [("warning", WEIGHT_SYNC), ("error", WEIGHT_SYNC)]
    assert said[0][2].startswith("rollout server 1: weight update 1: stale.")


@pytest.mark.parametrize(
    ("sends", "warned", "ends"),
    [
        # One that is missed ends nothing; two in a row do, and so do three of the last ten.
        ((True, False, True, True, False, True), 2, False),
        ((True, False, False), 1, True),
        ((False, True, False, True, False), 2, True),
        # What is more than ten updates ago is forgotten.
        ((False, True, False, *[True] * 9, False), 3, False),
    ],
)
def test_how_many_missed_updates_end_a_run(sends: tuple[bool, ...], warned: int, ends: bool) -> None:
    trainer, engine, verifier, said = started()
    with pytest.raises(WeightSyncError, match="stale") if ends else nullcontext():
        for sent in sends:
            for _ in range(5):
                trainer.train()
            verdict = verifier.verify(engine.receive(trainer.model) if sent else None)
            assert verdict is not None and verdict.ok == sent, verdict.message
    assert [level for level, *_ in said] == ["warning"] * warned + ["error"] * ends


def test_a_tensor_of_before_the_update_is_an_error_at_once() -> None:
    trainer, engine, verifier, said = started()
    trainer.train()
    assert verifier.verify(engine.receive(trainer.model)).ok  # type: ignore[union-attr]
    with torch.no_grad():  # below the floor of movement
        trainer.model.embed.weight[3, 3] += 0.01
    with pytest.raises(WeightSyncError, match="1 are the trainer's previous version"):
        verifier.verify({"embed.weight": trainer.model.embed.weight.detach().half()})
    assert [event[:2] for event in said] == [("error", WEIGHT_SYNC)]


def test_an_update_far_beyond_what_it_moved_is_an_error_at_once() -> None:
    trainer, engine, verifier, said = started()
    with torch.no_grad():
        trainer.model.embed.weight += 1e-3 * torch.randn(64, 32)
    engine.receive(trainer.model)
    with torch.no_grad():
        engine.model.embed.weight *= -1
    with pytest.raises(WeightSyncError, match="garbled"):
        verifier.verify()
    assert verifier.verdict is not None and verifier.verdict.clear and said[0][0] == "error"


def test_an_engine_that_does_not_answer_says_nothing_of_its_weights() -> None:
    trainer, engine, verifier, said = started()
    answers = engine.decode

    def busy(tokens: Tensor, count: int) -> Decoded:
        raise EngineError("no answer within 120 seconds")

    for decode in (busy, busy, busy, answers):
        trainer.train()
        engine.decode = decode  # type: ignore[method-assign]
        verdict = verifier.verify(engine.receive(trainer.model))
        assert (verdict is None) == (decode is busy) and not verifier.moved()
    assert verdict is not None and verdict.status == "in_sync"
    assert [event[:2] for event in said] == [("warning", SYNC_UNANSWERED)] * 3
    assert "no answer within 120 seconds" in said[0][2]


@pytest.mark.parametrize("past_is_right", [True, False])
def test_a_stale_decode_is_blamed_on_the_prefix_cache_if_it_is_right_past_it(past_is_right: bool) -> None:
    trainer, engine, verifier, said = started()
    engine.captured = copy.deepcopy(engine.model)

    def decode_afresh(tokens: Tensor, count: int) -> Decoded:
        cached, engine.decoder = engine.decoder, engine.model if past_is_right else engine.decoder
        try:
            return engine.decode(tokens, count)
        finally:
            engine.decoder = cached

    engine.decode_afresh = decode_afresh  # type: ignore[attr-defined]
    verifier.verify(engine.sample())
    trainer.train()
    with pytest.raises(WeightSyncError) as error:
        verifier.verify(engine.receive(trainer.model))
    assert ("past its prefix cache" in str(error.value)) == past_is_right
    assert verifier.verdict is not None and verifier.verdict.status == "stale_decode"


def test_a_trainer_that_was_asked_before_gives_the_verdict_of_one_asked_now() -> None:
    trainer, engine, verifier, _ = started()
    twin = copy.deepcopy(verifier)
    trainer.train()
    look = verifier.look()
    sent = engine.receive(trainer.model)
    with torch.no_grad():
        trainer.model.embed.weight.zero_()  # after the weights were sent: the look stands
    assert verifier.verify(sent, look).status == "in_sync"
    twin.rollout = engine
    assert twin.judge(sent).status != "in_sync"


def test_a_resumed_run_judges_alike() -> None:
    trainer, engine, verifier, _ = started()
    for _ in range(3):
        trainer.train()
        verifier.verify(engine.receive(trainer.model))
    for _ in range(10):
        trainer.train()  # and nothing is sent
    assert not verifier.verify().ok  # type: ignore[union-attr]
    state = json.loads(json.dumps(verifier.state_dict()))
    resumed = WeightVerifier(trainer, engine, MonitorConfig(), PROBES, dtype="float16")
    resumed.begin()
    assert resumed.load_state_dict(state) is None
    assert resumed.judge() == verifier.judge()
    with pytest.raises(WeightSyncError, match="stale"):  # the second in a row, of which the first was before
        resumed.verify()


@pytest.mark.parametrize(("dtype", "decoded"), [("bfloat16", 8), ("float16", 4)])
def test_the_state_of_other_settings_is_not_used(dtype: str, decoded: int) -> None:
    trainer, engine, verifier, _ = started()
    other = WeightVerifier(trainer, engine, MonitorConfig(), PROBES, dtype=dtype, decode_tokens=decoded)
    other.begin()
    begun = other.state_dict()
    message = other.load_state_dict(verifier.state_dict())
    assert message is not None and "begins anew" in message
    assert other.state_dict() == begun and other.judge().status == "unchanged"


def test_a_decode_with_the_weights_of_the_start_is_named_and_prefill_is_not_accused() -> None:
    trainer, engine, verifier, said = started()
    engine.captured = engine.model
    for _ in range(20):
        trainer.train()
        engine.receive(trainer.model)
        verdict = verifier.judge()
        if not verdict.ok:
            break
    assert verdict.status == "stale_decode" and "decode path does not compute with the weights" in verdict.message
    assert verdict.gap_mean < verdict.threshold < 0.2, "prefill is right"
    # Asked once more, with weights that have not moved since.
    with pytest.raises(WeightSyncError, match="decode path does not compute"):
        verifier.verify()
    assert said == [("error", WEIGHT_SYNC, verifier.verdict.message)]  # type: ignore[union-attr]


def test_prefill_is_named_before_decode() -> None:
    trainer, engine, verifier, _ = started()
    engine.captured = copy.deepcopy(engine.model)
    with torch.no_grad():
        engine.model.embed.weight *= -1
    assert verifier.judge().status == "garbled"


def test_an_engine_that_cannot_decode_is_refused_unless_decode_is_left_out() -> None:
    class Prefills:
        score, compare = Engine.score, Engine.compare

    trainer = Trainer()
    with pytest.raises(ConfigError, match="Prefills cannot be asked to decode.*weight_sync"):
        WeightVerifier(trainer, Prefills(), MonitorConfig(), PROBES, dtype="float16")  # type: ignore[arg-type]
    given = {"dtype": "float16", "decode_tokens": 0}
    verifier = WeightVerifier(trainer, Prefills(), MonitorConfig(), PROBES, **given)  # type: ignore[arg-type]
    assert verifier.decoded == 0


def test_the_state_of_a_run_that_verified_nothing_leaves_the_baseline() -> None:
    trainer, engine, verifier, _ = started()
    begun = verifier.state_dict()
    off = WeightVerifier(trainer, engine, MonitorConfig(weight_sync="off"), PROBES, dtype="float16").state_dict()
    assert verifier.load_state_dict(off) is None and verifier.state_dict() == begun


@pytest.mark.parametrize("answer", ["other shape", None])
def test_scores_that_cannot_be_judged_are_refused(answer: str | None) -> None:
    _, engine, verifier, _ = started()
    score = engine.score
    engine.score = lambda tokens: None if answer is None else score(tokens)[:, 1:]  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(RecordError, match="Engine.score returned a"):
        verifier.judge()


def test_decoded_tokens_that_cannot_be_judged_are_refused() -> None:
    _, engine, verifier, _ = started()
    decoded = engine.decode(verifier.prompts, 8)
    wrong = (None, replace(decoded, tokens=decoded.tokens[:, -8:]), replace(decoded, logprobs=decoded.logprobs[:, 1:]))
    for answer in wrong:
        engine.decode = lambda tokens, count, answer=answer: answer  # type: ignore[method-assign]
        with pytest.raises(RecordError, match="Engine.decode returned|allowed: .*tokens|allowed: .*logprobs"):
            verifier.judge()


def test_a_trainer_that_is_not_finite_is_named() -> None:
    trainer, _, verifier, _ = started()
    with torch.no_grad():
        trainer.model.mix[2].bias[:] = torch.nan
    with pytest.raises(NonFiniteLogprobError, match=r"probe \(0, 0\) \(row, position\) is nan"):
        verifier.judge()


def test_probes_are_the_same_in_every_run_and_fit_the_engine() -> None:
    vocabulary = torch.arange(10, 50)
    probes = draw_probes(vocabulary)
    assert torch.equal(probes, draw_probes(vocabulary)) and set(probes.flatten().tolist()) <= set(range(10, 50))
    assert draw_probes(vocabulary, longest=9).shape == (8, 9)
