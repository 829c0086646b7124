"""Turns that do not extend the ones before: every planted cause is named with its place, and none where nothing is planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from mismatch_ext.adapters.cli import main
from mismatch_ext.adapters.transformers.chat import TokenizerChat

from mismatch_ext.chains.examining import examine
from mismatch_ext.chains.logs import read_conversations
from mismatch_ext.chains.text import report
from mismatch_ext.chains.turns import CAUSES, Chains
from mismatch_ext.errors import RecordError
from tests.unit.conversations import (
    ANSWERS,
    QUESTIONS,
    assistant,
    call,
    chat_of,
    clean_calls,
    long_talk,
    tokenizer,
    user,
)
from tests.unit.tables import TABLES, table

BOTH = ("smollm2", "qwen3")
FIRST, SECOND, THIRD = QUESTIONS
THINKING = "<think>\nI add the two numbers.\n</think>\n\n"
SYSTEM = {"role": "system", "content": "You answer in one sentence."}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather of a city."}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time in a city."}}
END = "<|im_end|>"

Lines = list[dict[str, Any]]


def examined(chat: TokenizerChat, lines: Lines, **settings: Any) -> Chains:
    """Return what is found in a log."""
    numbered = ((f"log, line {number}", line) for number, line in enumerate(lines, start=1))
    conversations, notes = read_conversations(numbered, chat, settings=settings)
    return examine(conversations, chat, notes)


def two_turns(chat: TokenizerChat, answer: str = ANSWERS[0], **second: Any) -> Lines:
    """Return two calls; `second` replaces arguments of the second one, whose history is the client's."""
    given = {"messages": [user(FIRST), assistant(answer), user(SECOND)], **second}
    return [call(chat, [user(FIRST)], answer), call(chat, given.pop("messages"), ANSWERS[1], **given)]


def tokenized_again(chat: TokenizerChat) -> tuple[Lines, str]:
    """The policy sampled a word in single letters; the client sends the text."""
    lines = two_turns(chat)
    letters = [token for letter in ANSWERS[0] for token in chat.encode(letter)]
    lines[0]["response_ids"] = [*letters, *chat.encode(END)]
    return lines, "token 0 of the answer of turn 1"


def thinking_removed(chat: TokenizerChat) -> tuple[Lines, str]:
    """Qwen3's template leaves it out; with SmolLM2's the client does."""
    kept = THINKING + ANSWERS[0] if "last_query_index" in chat.template else ANSWERS[0]
    messages = [user(FIRST), assistant(kept), user(SECOND)]
    return two_turns(chat, THINKING + ANSWERS[0], messages=messages), "token 0 of the answer of turn 1"


def no_generation_prompt(chat: TokenizerChat) -> tuple[Lines, str]:
    lines = two_turns(chat)
    lines[0]["prompt_ids"] = chat.encode(chat.render([user(FIRST)]))
    return lines, "token 0 of the answer of turn 1"


def default_system(chat: TokenizerChat) -> tuple[Lines, str]:
    lines = two_turns(chat)
    lines[0] = call(chat, [SYSTEM, user(FIRST)], ANSWERS[0])
    return lines, "of the prompt"


def edited(chat: TokenizerChat) -> tuple[Lines, str]:
    messages = [user("How much is seventeen plus twenty-six?"), assistant(ANSWERS[0]), user(SECOND)]
    return two_turns(chat, messages=messages), "of the prompt"


def truncated(chat: TokenizerChat) -> tuple[Lines, str]:
    return two_turns(chat, messages=[user(FIRST), assistant("It is"), user(SECOND)]), "of the answer of turn 1"


def dropped(chat: TokenizerChat) -> tuple[Lines, str]:
    messages = [user(FIRST), assistant(ANSWERS[0]), user(SECOND), assistant(ANSWERS[1]), user(THIRD)]
    lines = two_turns(chat)
    lines.append(call(chat, messages[2:], ANSWERS[2]))
    return lines, "of the prompt"


def end_missing(chat: TokenizerChat) -> tuple[Lines, str]:
    lines = two_turns(chat)
    text = chat.decode(lines[1]["prompt_ids"]).replace(f"{ANSWERS[0]}{END}", ANSWERS[0])
    lines[1]["prompt_ids"] = chat.encode(text)
    last = len(lines[0]["response_ids"]) - 1
    return lines, f"token {last} of the answer of turn 1"


def end_doubled(chat: TokenizerChat) -> tuple[Lines, str]:
    messages = [user(FIRST), assistant(ANSWERS[0] + END), user(SECOND)]
    return two_turns(chat, messages=messages), "the end of the answer of turn 1"


def tool_text_counted(chat: TokenizerChat) -> tuple[Lines, str]:
    """One row holds the call, the tool's output and the answer, and its mask counts all of them."""
    request = 'I ask. {"city": "Paris"}' + END
    output = "\n<|im_start|>user\n21 degrees" + END + "\n<|im_start|>assistant\n"
    response = chat.encode(request) + chat.encode(output) + chat.encode(ANSWERS[0] + END)
    place = len(chat.encode(request))
    line = call(chat, [user(FIRST)], "", response_ids=response, response_mask=[True] * len(response))
    return [line], f"token {place} of the answer of turn 1"


def whitespace(chat: TokenizerChat) -> tuple[Lines, str]:
    return two_turns(chat, "  It is forty-two.", messages=[user(FIRST), assistant(ANSWERS[0]), user(SECOND)]), (
        "of the answer of turn 1"
    )


def tools_reordered(chat: TokenizerChat) -> tuple[Lines, str]:
    lines = two_turns(chat, tools=[CLOCK, WEATHER])
    lines[0] = call(chat, [user(FIRST)], ANSWERS[0], tools=[WEATHER, CLOCK])
    return lines, "of the prompt"


def empty_thinking(chat: TokenizerChat) -> tuple[Lines, str]:
    off = {"enable_thinking": False}
    lines = two_turns(chat, chat_template_kwargs=off)
    lines[0] = call(chat, [user(FIRST)], ANSWERS[0], chat_template_kwargs=off)
    return lines, "of the prompt"


def call_rewritten(chat: TokenizerChat) -> tuple[Lines, str]:
    sampled = '<tool_call>\n{"name": "weather", "arguments": {"city":"Paris","day":1}}\n</tool_call>'
    function = {"name": "weather", "arguments": {"city": "Paris", "day": 1}}
    again = assistant("", tool_calls=[{"type": "function", "function": function}])
    messages = [user(FIRST), again, {"role": "tool", "content": "21 degrees"}]
    lines = two_turns(chat, sampled, messages=messages, tools=[WEATHER])
    lines[0] = call(chat, [user(FIRST)], sampled, tools=[WEATHER])
    return lines, "of the answer of turn 1"


PLANTED: list[tuple[str, str, Callable[[TokenizerChat], tuple[Lines, str]], str]] = [
    *(
        (template, cause, plant, fix)
        for template in BOTH
        for cause, plant, fix in (
            ("retokenized", tokenized_again, "send the token ids of the turn before"),
            ("generation_prompt", no_generation_prompt, "add_generation_prompt=True"),
            ("system_prompt", default_system, "the system message of the first one"),
            ("turn_edited", edited, "send the history as it was sampled"),
            ("turn_truncated", truncated, "send the history as it was sampled"),
            ("turn_dropped", dropped, "send the history as it was sampled"),
            ("end_missing", end_missing, "render the prompt by this chat template"),
            ("end_doubled", end_doubled, f"cut {END} off"),
            ("tool_text_counted", tool_text_counted, ""),
            ("whitespace", whitespace, "as the content that was sampled"),
        )
    ),
    ("smollm2", "thinking_removed", thinking_removed, "as the content that was sampled"),
    ("qwen3", "thinking_removed", thinking_removed, "write `true` for `loop.index0 > ns.last_query_index`"),
    ("qwen3", "tools_reordered", tools_reordered, "the same tools in the same order"),
    ("qwen3", "generation_prompt", empty_thinking, "and write `true` for `loop.last or"),
    ("qwen3", "tool_call_rewritten", call_rewritten, "as the content that was sampled"),
]


@pytest.mark.parametrize(
    ("template", "cause", "plant", "fix"), PLANTED, ids=[f"{entry[0]}-{entry[2].__name__}" for entry in PLANTED]
)
def test_a_planted_break_is_named_with_its_place_and_a_fix_that_was_tried(
    template: str, cause: str, plant: Callable[[TokenizerChat], tuple[Lines, str]], fix: str
) -> None:
    chat = chat_of(template)
    lines, place = plant(chat)
    chains = examined(chat, lines)
    assert [found.cause for found in chains.breaks] == [cause], report(chains)
    (found,) = chains.breaks
    assert place in found.place and found.further == ()
    assert fix in (found.fix.change if found.fix else ""), (found.fix, found.tried)
    assert CAUSES[cause] in report(chains) and found.where in report(chains)
    assert found.forks == (cause not in ("end_doubled", "tool_text_counted"))
    assert chains.samples == 1 + found.forks and chains.forked == found.forks and chains.status == 1


@pytest.mark.parametrize("template", BOTH)
@pytest.mark.parametrize("turns", [1, 2, 5, 20])
def test_nothing_is_named_in_a_clean_conversation(template: str, turns: int) -> None:
    chat = chat_of(template)
    whole = {"id": "whole", "messages": long_talk(turns)}
    chains = examined(chat, [*clean_calls(chat, turns), whole])
    assert chains.breaks == () and chains.turns == 2 * turns
    assert (chains.samples, chains.status) == (2, 0)


def test_sampled_tokens_behind_a_break_are_counted_once() -> None:
    chat = chat_of("smollm2")
    messages = long_talk(3)
    lines = clean_calls(chat, 3)
    changed = [*messages[:4], user("Another question?"), assistant("Yes."), user("And now?")]
    changed[1] = assistant("Wrong.")
    lines.append(call(chat, changed, "Done."))
    changed = [*changed, assistant("Done."), user("Once more?")]
    lines.append(call(chat, [user("What?"), *changed[1:]], "Over."))
    chains = examined(chat, lines)
    lost = [found.misplaced for found in chains.breaks]
    sampled = [len(line["response_ids"]) for line in lines]
    kept = chains.breaks[0].token - len(lines[0]["prompt_ids"])
    # The first break takes the first three answers from where they differ, the second one the last answer alone.
    assert lost == [sum(sampled[:3]) - kept, sampled[3] + kept]
    assert chains.misplaced_tokens == sum(sampled[:4]) and chains.forked == 1


def test_a_second_sample_of_a_prompt_is_a_branch_and_no_break() -> None:
    chat = chat_of("smollm2")
    lines = clean_calls(chat, 2)
    lines.insert(1, call(chat, lines[0]["messages"], "Another answer."))
    chains = examined(chat, lines)
    assert chains.breaks == () and chains.samples == 3


def test_an_end_that_the_engine_cut_off_is_named() -> None:
    chat = chat_of("smollm2")
    lines = two_turns(chat)
    lines[0] |= {"response_ids": lines[0]["response_ids"][:-1], "finish_reason": "stop"}
    (found,) = examined(chat, lines).breaks
    assert found.cause == "end_missing" and not found.forks
    # An answer that reached its limit has no end to lose.
    lines[0]["finish_reason"] = "length"
    assert examined(chat, lines).breaks == ()


def test_a_difference_without_a_known_cause_is_unknown() -> None:
    chat = chat_of("smollm2")
    lines = two_turns(chat)
    lines[1]["prompt_ids"] = chat.encode("something else")
    chains = examined(chat, lines)
    assert chains.breaks[0].cause == "unknown" and chains.status == 3


def write(path: Path, lines: Lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def folder_of(template: str, path: Path) -> Path:
    tokenizer(template).save_pretrained(path)
    return path


def test_the_command_reads_a_log_without_token_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # As proxies of OpenAI's API keep it.
    log, folder = TABLES / "openai_log.jsonl", folder_of("qwen3", tmp_path / "tokenizer")
    arguments = ["doctor", "--turns", str(log), "--tokenizer", str(folder), "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert "1 of 1 conversations fork (100%); training samples: 2" in printed
    assert CAUSES["thinking_removed"] in printed and "have no token ids" in printed
    written = json.loads((tmp_path / "out" / "turns.json").read_text(encoding="utf-8"))
    assert written["forked_frac"] == 1 and written["breaks"][0]["cause"] == "thinking_removed"
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Where turns break" in page and CAUSES["thinking_removed"] in page


def test_text_of_models_cannot_act_on_a_page_or_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_of("smollm2")
    evil = "<script>alert(1)</script>\x1b[31m\u202e[bold]"
    messages = [user(FIRST), assistant("It is fine."), user(SECOND)]
    lines = two_turns(chat, evil, messages=messages)
    for line in lines:
        line["conversation"] = evil
    log, folder = write(tmp_path / "log.jsonl", lines), folder_of("smollm2", tmp_path / "tokenizer")
    assert main(["doctor", "--turns", str(log), "--tokenizer", str(folder), "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for text in (printed, page):
        assert "\x1b" not in text and "\u202e" not in text and "[bold]" in text
    assert "<script" not in page and "&lt;script&gt;" in page


def test_dumps_of_verl_and_trl_are_read(tmp_path: Path) -> None:
    import pandas as pd

    chat = chat_of("qwen3")
    thought = THINKING + ANSWERS[0]
    first = "user\nHi\nassistant\n"
    dumped = ((first, thought), (f"{first}{ANSWERS[0]}\nuser\nAnd?\n", "Yes"))
    verl = [{"input": text, "output": answer, "score": 1, "step": 1, "request_id": "r"} for text, answer in dumped]
    (found,) = examined(chat, verl).breaks
    assert found.cause == "thinking_removed" and found.fix is None
    table = pd.DataFrame({"step": [1], "prompt": [[user(FIRST)]], "completion": [
        [assistant(thought), user(SECOND), assistant(ANSWERS[1])]
    ], "advantage": [0.5]})  # fmt: skip
    path = tmp_path / "completions_00001.parquet"
    table.to_parquet(path)
    folder = folder_of("qwen3", tmp_path / "tokenizer")
    assert main(["doctor", "--turns", str(path), "--model", str(folder), "--out", str(tmp_path / "out")]) == 1
    written = json.loads((tmp_path / "out" / "turns.json").read_text(encoding="utf-8"))
    assert [found["cause"] for found in written["breaks"]] == ["thinking_removed"]


@pytest.mark.parametrize(*table("turn_lines"))
def test_a_line_that_cannot_be_read_is_refused(line: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        examined(chat_of("smollm2"), [line])


def chat_with(template: str) -> TokenizerChat:
    """Return the small tokenizer with the text of another template."""
    made = deepcopy(tokenizer("qwen3"))
    made.chat_template = template
    return TokenizerChat(made)


def of_trl(name: str) -> str:
    """Return a template that TRL ships."""
    return resources.files("trl").joinpath(f"chat_templates/{name}.jinja").read_text(encoding="utf-8")


def test_a_setting_of_the_template_is_tried_before_its_lines() -> None:
    chat = chat_with(of_trl("qwen3_6"))
    messages = [user(FIRST), assistant(THINKING + ANSWERS[0]), user(SECOND), assistant(THINKING + ANSWERS[1])]
    (found,) = examined(chat, [{"id": "a", "messages": messages}]).breaks
    assert found.cause == "thinking_removed" and found.fix is not None
    assert found.fix.change == "chat template setting preserve_thinking=True"


def test_thinking_that_a_template_adds_is_named_where_the_log_shows_that_it_was_not_sampled() -> None:
    chat = chat_with(of_trl("qwen3_training"))
    (found,) = examined(chat, two_turns(chat)).breaks
    assert found.cause == "thinking_added" and found.place == "token 0 of the answer of turn 1"
    # Messages alone do not tell, and the model may have sampled what the template writes.
    assert examined(chat, [{"id": "a", "messages": long_talk(5)}]).breaks == ()


def test_a_message_that_the_template_alone_changes_is_not_called_edited() -> None:
    plain = chat_of("smollm2").template
    chat = chat_with(plain.replace("message['content']", "message['content'] | replace('forty', 'fifty')"))
    (found,) = examined(chat, two_turns(chat)).breaks
    assert found.cause == "template_rewrites"
    messages = [user(FIRST), assistant("It is fifty-two."), user(SECOND)]
    (found,) = examined(chat, two_turns(chat, messages=messages)).breaks
    assert found.cause == "turn_edited"
