"""The story of docs/index.md and the examples of docs/doctor.md: commands as they stand there, and what the pages say of them."""

from __future__ import annotations

import re

import pytest

from tests.commands import ROOT, shell

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def told(page: str, heading: str) -> list[str]:
    """Run the commands under a heading, one block after the other, and return what each block printed."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"\n## {heading}")[2].partition("\n## ")[0]
    # The doctor's status 1 is an explained gap.
    return [shell(block, statuses=(0, 1)) for block in re.findall(r"```bash\n(.*?)```", text, re.S)]


def test_the_story_of_the_quick_start() -> None:
    before, doctor, after = told("docs/index.md", "Ten minutes")
    gaps = [float(re.findall(r"mean \|Δlogp\| (\S+) ->", said)[0]) for said in (before, after)]
    # The page says 0.0098 and 0.001 nats per token.
    assert gaps[0] > 4 * gaps[1]
    assert re.search(r"repetition_penalty 1\.0[45].*cause, confirmed", doctor), doctor
    assert "report.html" in shell("mismatch-ext report runs/story")


def test_the_three_examples_of_the_doctor() -> None:
    top_p, mixture, base, older = told("docs/doctor.md", "Three examples")
    assert re.search(r"the engine samples with top_p 0\.\d+ .*cause, confirmed", top_p) and "\nExplained" in top_p, (
        top_p
    )
    assert "\nClean" in mixture, mixture
    assert "the adapter is not applied" in base and "\nExplained" in base, base
    assert re.search(r"weights of runs/lora/checkpoint-10 .*cause, confirmed", older), older
