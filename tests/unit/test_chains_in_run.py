"""Forks as metrics of a run: their share and causes, of completions that are joined from calls, and in your own loop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mismatch_ext.adapters.trl.turns import forks_of, matched_turns
from torch import Tensor

from mismatch_ext import Run
from mismatch_ext.chains.in_run import Forks
from mismatch_ext.checks import Checks
from mismatch_ext.rollout import Provenance, RolloutRecord, SamplingSettings
from tests.unit.conversations import ANSWERS, QUESTIONS, assistant, chat_of, tokenizer, user
from tests.unit.loops import learn, sides

HERE = Provenance(
    engine="vllm", engine_version="0", dtype="float32", kv_cache_dtype=None, weight_version=3, patch_digest="none",
    sampling=SamplingSettings(), logprobs_mode="processed_logprobs",
)  # fmt: skip
CHAT = chat_of("qwen3")
THINKING = "<think>\nI add the two numbers.\n</think>\n\n"


def record(prompt: list[int], response: list[int]) -> RolloutRecord:
    """Return one call."""
    return RolloutRecord(
        prompt_ids=tuple(prompt), response_ids=tuple(response), rollout_logprobs=(-0.5,) * len(response),
        response_mask=(True,) * len(response), finish_reason="stop", provenance=HERE,
    )  # fmt: skip


def talk(number: int, *, thinks: bool) -> list[RolloutRecord]:
    """Return two calls, each with a prompt that the template renders; it leaves out the thinking of the first answer."""
    question = user(f"{QUESTIONS[0]} ({number})")
    answer = (THINKING if thinks else "") + ANSWERS[0]
    second = [question, assistant(answer), user(QUESTIONS[1])]
    prompts = [CHAT.encode(CHAT.render(messages, add_generation_prompt=True)) for messages in ([question], second)]
    answers = [CHAT.encode(f"{text}<|im_end|>") for text in (answer, ANSWERS[1])]
    return [record(prompt, response) for prompt, response in zip(prompts, answers, strict=True)]


def rows(talks: list[list[RolloutRecord]]) -> tuple[list[list[int]], list[list[int]], list[list[int]], None, None]:
    """Return what TRL would train on: the last prompt and its answer, of which both answers count as the policy's."""
    prompts, completions, masks = [], [], []
    for first, last in talks:
        whole = [*last.prompt_ids, *last.response_ids]
        start = len(first.prompt_ids)
        begun = len(last.prompt_ids) - start
        answer = len(first.response_ids)
        prompts.append(whole[:start])
        completions.append(whole[start:])
        inserted = max(0, begun - answer)
        masks.append([1] * (begun - inserted) + [0] * inserted + [1] * len(last.response_ids))
    return prompts, completions, masks, None, None


@pytest.mark.parametrize("thinking", [0, 3])
def test_completions_that_fork_are_counted_with_their_cause(thinking: int) -> None:
    talks = [talk(number, thinks=number < thinking) for number in range(4)]
    calls = [call for turns in talks for call in turns]
    metrics = forks_of(
        matched_turns(calls, rows(talks), own=True, limit=512), tokenizer("qwen3"), Checks(True)
    ).metrics()
    expected = {"turns/forked_frac": thinking / 4}
    if thinking:
        expected["turns/forked/thinking_removed"] = thinking / 4
    misplaced = metrics.pop("turns/misplaced_frac")
    assert metrics == expected and (misplaced > 0) == (thinking > 0)


def test_a_tokenizer_that_fails_costs_the_causes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a bug of the tokenizer's ends no run, not even one whose config acts."""
    talks = [talk(0, thinks=True)]

    def broken(*_: object, **__: object) -> str:
        raise ZeroDivisionError("a bug of a tokenizer")

    monkeypatch.setattr("mismatch_ext.adapters.transformers.chat.TokenizerChat.decode", broken)
    checks = Checks(True)
    matched = matched_turns(talks[0], rows(talks), own=True, limit=512)
    with pytest.warns(UserWarning, match="a bug of a tokenizer"):
        metrics = forks_of(matched, tokenizer("qwen3"), checks).metrics()
    assert set(metrics) == {"turns/forked_frac", "turns/misplaced_frac"} and checks.counts["turns"] == 1


class Twice:
    """Two ranks with equal numbers."""

    rank, size = 0, 2

    def gather(self, value: object) -> list[object]:
        return [value, value]

    def sum(self, values: Tensor) -> Tensor:
        return 2 * values


def test_forks_are_those_of_all_ranks() -> None:
    one = Forks(conversations=4, forked=1, causes=Counter({"retokenized": 1}), misplaced=3, tokens=12)
    both = one.over(Twice())
    assert both == Forks(conversations=8, forked=2, causes=Counter({"retokenized": 2}), misplaced=6, tokens=24)
    assert both.metrics() == one.metrics()


def test_your_own_loop_notes_the_forks_of_its_conversations(tmp_path: Path) -> None:
    run = Run(None, *sides(), tmp_path)
    conversations = [talk(number, thinks=number == 0) for number in range(4)]
    with run.start():
        run.turns(conversations, CHAT)
        run.turns(conversations[1:])
        (metrics,) = learn(run, 1)
    # The mean over 4 and 3 conversations.
    assert metrics["mismatch/turns/forked_frac"] == pytest.approx(1 / 7)
    assert metrics["mismatch/turns/forked/thinking_removed"] == pytest.approx(1 / 4)
