"""The example task, its tokenizer and its shipped checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.arithmetic import shipped
from examples.arithmetic.shipped import FOLDER, DamagedModelError, shipped_model
from examples.arithmetic.task import (
    CHARACTERS,
    reward,
    score,
    worked_answer,
)
from examples.arithmetic.tokenizer import EOS_ID, PAD_ID, encode, make_tokenizer

pytestmark = pytest.mark.numeric


# task


def test_worked_answer_by_hand() -> None:
    # 386 + 47: 6+7 = 13, write 3 carry 1; 8+4+1 = 13, write 3 carry 1; 3+0+1 = 4. Sum 433.
    assert worked_answer(386, 47) == "6+7+0=13,8+4+1=13,3+0+1=04:433"


@pytest.mark.parametrize("completion", [":433", "6+7+0=13,8+4+1=13,3+0+1=04:433", "nonsense:433"])
def test_reward_of_a_right_answer(completion: str) -> None:
    assert score(completion, 386, 47) == reward(completions=[completion], a=[386], b=[47])[0] == 1.0


HOSTILE = ["", ":4330", ":0433", ":4_33", ":" + "9" * 5000]


@pytest.mark.parametrize("completion", HOSTILE)
def test_reward_of_hostile_text_is_zero(completion: str) -> None:
    assert score(completion, 386, 47) == 0.0


# tokenizer


@given(st.text(alphabet=CHARACTERS))
def test_tokenizer_round_trip(text: str) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == encode(text)
    assert tokenizer.decode([PAD_ID, *ids, EOS_ID], skip_special_tokens=True) == text


# checkpoints


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_shipped_models_are_what_was_committed(kind: str) -> None:
    assert shipped_model(kind) == FOLDER / kind


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_shipped_model_is_an_error_that_says_what_to_do(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(FOLDER, tmp_path / "models")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "models")
    file = tmp_path / "models/dense/model.safetensors"
    file.unlink() if damage == "missing" else file.write_bytes(b"other weights")
    with pytest.raises(DamagedModelError, match=f"git checkout -- {file}"):
        shipped_model("dense")
