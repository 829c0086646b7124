"""Pages that tell a story or answer a question hold what they show to what can be run, parsed and measured."""

from __future__ import annotations

import re

import pytest
import yaml

from examples.doctor import prompts
from mismatch_ext.config import MismatchConfig
from tests.readme import ROOT
from tests.stories import STORIES, figureless, missing, told

QUESTIONS = (ROOT / "docs/questions.md").read_text(encoding="utf-8")
ASKED = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", QUESTIONS, flags=re.DOTALL | re.MULTILINE)
TABLES = "\n".join((ROOT / f"docs/{page}.md").read_text(encoding="utf-8") for page in ("metrics", "drift"))
NAMES = set(re.findall(r"^\| `(?:mismatch/)?([\w./]+)`", TABLES, flags=re.MULTILINE))


@pytest.mark.parametrize("title", STORIES)
def test_a_story_ends_within_four_commands_and_shows_what_they_print(title: str) -> None:
    steps = told(*STORIES[title])
    assert 2 <= len(steps) <= 4 and all(step.shown for step in steps), title


@pytest.mark.parametrize(("question", "answer"), ASKED, ids=lambda text: text[:40])
def test_an_answer_has_a_block_that_is_taken_and_figures_that_are_logged(question: str, answer: str) -> None:
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", answer, flags=re.DOTALL)]
    assert blocks, question
    for block in blocks:
        assert MismatchConfig.parse(block.pop("mismatch")) is not None
        assert set(block) <= {"top_p", "top_k", "min_p"}
    logged = re.findall(r"`mismatch/([\w./]+)`", answer)
    assert logged or question.startswith("May I"), question
    for name in logged:
        # Parts of the gap have the names of the whole behind theirs.
        assert name in NAMES or name.removeprefix("native/").removeprefix("numerics/").removeprefix("drift/") in NAMES


def test_what_a_page_shows_is_missed_where_it_is_not_printed() -> None:
    shown = ("gap 1.10e-02 on 6,830 tokens", "cause  99% (98% to 100%), slope 1.00")
    assert figureless("x -0%  y 1.2e-5") == "x #% y #%".replace("y #%", "y #")
    assert not [*missing(shown, "a\ngap 9e-3 on 12 tokens\nb\ncause 7% (-1% to 8%), slope 0.9\n")]
    assert [*missing(shown, "cause 7% (-1% to 8%), slope 0.9\ngap 9e-3 on 12 tokens\n")] == [shown[1]]
    assert [*missing(shown, "")] == [*shown] and not [*missing(("cause 7% ...",), "cause 99% (98%)")]


def test_the_prompts_are_those_of_their_script() -> None:
    assert prompts.FILE.read_text(encoding="utf-8") == prompts.lines()
