"""The check of an engine's decode: noise of both passes, and decodes that kept something, as a policy moves."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from mismatch_ext.errors import RecordError, WeightSyncError
from mismatch_ext.weight_sync.checker import FLOOR
from mismatch_ext.weight_sync.decoding import DecodeChecker, Decoded

ROWS, PROMPT, COUNT, VOCABULARY = 8, 24, 8, 64
NOISE = {"float32": 3e-7, "float16": 5e-4, "bfloat16": 8e-3}
STEP = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
PROMPTS = torch.randint(VOCABULARY, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))


class Engine:
    """Logits that move by a step in each update, with noise of its own in each of its two passes."""

    def __init__(self, dtype: str, step: float, *, by_chance: bool = False, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.noise, self.step, self.by_chance = NOISE[dtype], step, by_chance
        self.now = 2 * torch.randn(VOCABULARY, VOCABULARY, generator=self.random, dtype=torch.float64)
        self.decodes: Tensor | None = None

    def update(self) -> None:
        self.now = self.now + self.step * torch.randn(self.now.shape, generator=self.random, dtype=torch.float64)

    def capture(self) -> None:
        self.decodes = self.now

    def _noisy(self, logprobs: Tensor, random: torch.Generator) -> Tensor:
        return logprobs + self.noise * torch.randn(logprobs.shape, generator=random, dtype=torch.float64)

    def ask(self) -> tuple[Decoded, Tensor]:
        """Decode, with the same noise each time unless the engine draws by chance, and let prefill score it."""
        held = self.now if self.decodes is None else self.decodes
        draws = torch.Generator().manual_seed(5)
        tokens, scores = PROMPTS, []
        for _ in range(COUNT):
            now = held[tokens[:, -1]].log_softmax(-1)
            drawn = torch.multinomial(now.exp(), 1, generator=self.random if self.by_chance else draws)
            tokens = torch.cat([tokens, drawn], 1)
            scores.append(now.gather(1, drawn))
        logprobs = self._noisy(torch.cat(scores, 1), draws)
        truth = self.now[tokens[:, PROMPT - 1 : -1]].log_softmax(-1).gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)
        return Decoded(tokens=tokens, logprobs=logprobs), self._noisy(truth, self.random)


@pytest.mark.parametrize("by_chance", [False, True])
@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("step", [0.0, 1e-3, 0.3])
def test_an_engine_that_decodes_as_it_prefills_is_never_accused(dtype: str, step: float, by_chance: bool) -> None:
    for seed in range(2):
        engine, checker = Engine(dtype, step, by_chance=by_chance, seed=seed), DecodeChecker(dtype)
        checker.baseline(*engine.ask())
        for _ in range(15):
            engine.update()
            verdict = checker.observe(*engine.ask(), numerics=NOISE[dtype])
            assert verdict.ok, verdict.message


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("dtype", NOISE)
def test_a_decode_that_was_captured_is_named_as_soon_as_the_policy_has_moved(dtype: str, begun: bool) -> None:
    engine, checker = Engine(dtype, STEP[dtype]), DecodeChecker(dtype)
    if begun:
        checker.baseline(*engine.ask())
    else:
        assert checker.observe(*engine.ask(), numerics=NOISE[dtype]).ok
    engine.capture()
    for _ in range(12):  # each is about as large as the noise
        engine.update()
        verdict = checker.observe(*engine.ask(), numerics=NOISE[dtype])
        if not verdict.ok:
            break
    assert not verdict.ok and "has not changed in a bit" in verdict.message
    assert "decode path does not compute with the weights that its prefill has" in verdict.message
    assert verdict.gap < verdict.threshold, "it is named before the gap alone would"


def test_a_captured_decode_that_is_not_reproducible_is_named_by_the_older_weights() -> None:
    engine, checker = Engine("bfloat16", 0.0), DecodeChecker("bfloat16")
    engine.step = 0.05
    checker.baseline(*engine.ask())
    engine.capture()
    engine.update()
    decoded, prefill = engine.ask()
    shaken = Decoded(tokens=decoded.tokens, logprobs=decoded.logprobs + 1e-4 * torch.randn(ROWS, COUNT))
    verdict = checker.observe(shaken, prefill, numerics=NOISE["bfloat16"])
    assert (
        not verdict.ok and "from its prefill of before updates" in verdict.message and verdict.gap < verdict.threshold
    )


def test_a_decode_that_is_wrong_from_the_start_is_not_its_own_measure() -> None:
    engine, checker = Engine("bfloat16", 0.3, by_chance=True), DecodeChecker("bfloat16")
    engine.capture()
    engine.update()
    checker.baseline(*engine.ask())
    verdict = checker.observe(*engine.ask(), numerics=NOISE["bfloat16"])
    assert not verdict.ok and verdict.gap > verdict.threshold >= 10 * NOISE["bfloat16"]


def test_routes_that_flip_in_few_tokens_are_left_out() -> None:
    engine, checker = Engine("bfloat16", 0.0), DecodeChecker("bfloat16")
    checker.baseline(*engine.ask())
    decoded, prefill = engine.ask()
    prefill[:5, 3] += 2.0  # 5 of the 56 that are compared
    assert checker.observe(decoded, prefill, numerics=NOISE["bfloat16"]).ok
    prefill[:, 3] += 2.0
    assert not checker.observe(decoded, prefill, numerics=NOISE["bfloat16"]).ok


def test_the_first_token_of_each_row_is_prefills_own() -> None:
    engine, checker = Engine("float32", 0.0), DecodeChecker("float32")
    checker.baseline(*engine.ask())
    decoded, prefill = engine.ask()
    prefill[:, 0] += 5.0
    assert checker.observe(decoded, prefill, numerics=0.0).ok
    prefill[:, 1:] += 2 * FLOOR["float32"]
    assert not checker.observe(decoded, prefill, numerics=0.0).ok


def test_a_logprob_that_is_not_finite_is_named() -> None:
    engine, checker = Engine("float16", 0.0), DecodeChecker("float16")
    decoded, prefill = engine.ask()
    decoded.logprobs[2, 3] = torch.nan
    checker.baseline(decoded, prefill)
    verdict = checker.observe(decoded, prefill, numerics=1e-3)
    assert not verdict.ok and "not finite" in verdict.message
    assert checker.observe(*engine.ask(), numerics=1e-3).ok, "it is no baseline"


def test_state_goes_through_json_and_judges_on() -> None:
    engine, checker = Engine("bfloat16", 0.01), DecodeChecker("bfloat16")
    checker.baseline(*engine.ask())
    engine.capture()
    checker.observe(*engine.ask(), numerics=NOISE["bfloat16"])
    again = DecodeChecker("bfloat16")
    again.load_state_dict(json.loads(json.dumps(checker.state_dict())))
    assert again.state_dict() == checker.state_dict()
    for _ in range(12):
        engine.update()
        asked = engine.ask()
        one, two = (c.observe(*asked, numerics=NOISE["bfloat16"]) for c in (checker, again))
        assert one == two
    assert not one.ok
    other = DecodeChecker("float16")
    other.load_state_dict(checker.state_dict())
    assert other.state_dict() == DecodeChecker("float16").state_dict()
    with pytest.raises(WeightSyncError, match="version 9"):
        other.load_state_dict(checker.state_dict() | {"version": 9})


def test_a_checkpoint_of_another_number_of_tokens_begins_anew() -> None:
    engine, checker, fewer = Engine("bfloat16", 0.01), DecodeChecker("bfloat16"), DecodeChecker("bfloat16")
    decoded, prefill = engine.ask()
    fewer.baseline(Decoded(tokens=decoded.tokens[:, :-3], logprobs=decoded.logprobs[:, :-3]), prefill[:, :-3])
    checker.load_state_dict(fewer.state_dict())
    assert checker.observe(decoded, prefill, numerics=NOISE["bfloat16"]).ok
    engine.capture()  # it is named as soon as without the checkpoint
    while checker.observe(*engine.ask(), numerics=NOISE["bfloat16"]).ok:
        engine.update()
    assert [len(entry[0][0]) for entry in checker.state_dict()["seen"]] == [COUNT - 1] * len(
        checker.state_dict()["seen"]
    )


def test_shapes_that_do_not_fit_are_refused() -> None:
    decoded, prefill = Engine("float32", 0.0).ask()
    with pytest.raises(RecordError, match="allowed: the same shape"):
        DecodeChecker("float32").baseline(decoded, prefill[:, 1:])
