"""The example task, its tokenizer and its checkpoints, shipped and trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from examples.arithmetic import shipped
from examples.arithmetic.pretrain import write
from examples.arithmetic.recipe import RECIPES, build_model
from examples.arithmetic.shipped import FOLDER, DamagedModelError, shipped_model
from examples.arithmetic.task import (
    CHARACTERS,
    make_dataset,
    reward,
    score,
    worked_answer,
)
from examples.arithmetic.tokenizer import EOS_ID, PAD_ID, VOCABULARY, encode, make_tokenizer

pytestmark = pytest.mark.numeric

OPERAND = st.integers(min_value=0, max_value=10**9)

TWO_STEPS = {
    kind: replace(
        recipe,
        steps=2,
        batch_size=4,
        hidden_size=32,
        layers=1,
        heads=1,
        key_value_heads=1,
        intermediate_size=32,
        expert_intermediate_size=32,
    )
    for kind, recipe in RECIPES.items()
}


# task


def test_worked_answer_by_hand() -> None:
    # 386 + 47: 6+7 = 13, write 3 carry 1; 8+4+1 = 13, write 3 carry 1; 3+0+1 = 4. Sum 433.
    assert worked_answer(386, 47) == "6+7+0=13,8+4+1=13,3+0+1=04:433"


def test_worked_answer_writes_the_last_carry() -> None:
    # 95 + 7: 5+7 = 12, carry 1; 9+0+1 = 10, carry 1. Sum 102.
    assert worked_answer(95, 7) == "5+7+0=12,9+0+1=10:102"


@pytest.mark.parametrize("completion", [":433", "6+7+0=13,8+4+1=13,3+0+1=04:433", "nonsense:433"])
def test_reward_of_a_right_answer(completion: str) -> None:
    assert score(completion, 386, 47) == reward(completions=[completion], a=[386], b=[47])[0] == 1.0


HOSTILE = ["", ":", "433", ":43", ":4330", ":0433", ":+433", ": 433", ":433\n", ":4_33", ":4e2", ":12:433", ":433<eos>"]
# Other digits that int() and \\d accept, and more than int() does.
HOSTILE += [":\u0664\u0663\u0663", ":433\x00", ":" + "9" * 5000, "\ud800:433\ud800"]


@pytest.mark.parametrize("completion", HOSTILE)
def test_reward_of_hostile_text_is_zero(completion: str) -> None:
    assert score(completion, 386, 47) == 0.0


def test_dataset_is_determined_by_its_arguments() -> None:
    rows = make_dataset(64, (2, 5), seed=3)
    assert rows == make_dataset(64, (2, 5), seed=3)
    assert rows[:10] == make_dataset(10, (2, 5), seed=3)
    assert rows != make_dataset(64, (2, 5), seed=4)
    assert rows != make_dataset(64, (2, 6), seed=3)
    assert all(row["prompt"] == f"{row['a']}+{row['b']}=" for row in rows)


# tokenizer


@given(st.text(alphabet=CHARACTERS))
def test_tokenizer_round_trip(text: str) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == encode(text)
    assert tokenizer.decode([PAD_ID, *ids, EOS_ID], skip_special_tokens=True) == text


# checkpoints


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_model_and_tokenizer_have_one_vocabulary(kind: str) -> None:
    model = build_model(RECIPES[kind])
    size = len(make_tokenizer())
    assert size == len(VOCABULARY) == len(CHARACTERS) + 2
    assert model.config.vocab_size == model.lm_head.weight.shape[0] == size
    assert model.get_input_embeddings().weight.shape[0] == size


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_trained_checkpoint_is_shipped_and_loads_as_any_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    write(TWO_STEPS[kind], tmp_path / kind, "a command")
    path = shipped_model(kind)  # its sums are those of its files
    model = AutoModelForCausalLM.from_pretrained(path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer("386+47=")["input_ids"] == encode("386+47=")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS_ID, PAD_ID)
    assert tokenizer.padding_side == "left"
    generation = GenerationConfig.from_pretrained(path)
    assert (generation.eos_token_id, generation.pad_token_id) == (EOS_ID, PAD_ID)
    record = json.loads((path / "training.json").read_text())
    assert record["recipe"]["kind"] == kind and record["command"] == "a command"
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    assert record["history"][-1]["step"] == 2


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
