"""The example task, its tokenizer, its training data and its checkpoints."""

from __future__ import annotations

import json
import os
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from examples.arithmetic import packing, pretrain
from examples.arithmetic.packing import IGNORED, draw_demonstrations, pack
from examples.arithmetic.pretrain import cache_key, ensure_model
from examples.arithmetic.recipe import RECIPES, Recipe, build_model
from examples.arithmetic.task import (
    CHARACTERS,
    FAMILIAR_DIGITS,
    UNFAMILIAR_DIGITS,
    demonstration,
    direct_answer,
    format_prompt,
    is_worked,
    make_dataset,
    reward,
    sample_problem,
    score,
    worked_answer,
)
from examples.arithmetic.tokenizer import EOS_ID, PAD_ID, VOCABULARY, encode, make_tokenizer
from tests.models import tiny_model

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
        evaluation_samples=4,
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


@given(OPERAND, OPERAND)
def test_answers_without_errors_are_correct(a: int, b: int) -> None:
    assert score(worked_answer(a, b), a, b) == 1.0
    assert score(direct_answer(a, b), a, b) == 1.0


@given(OPERAND, OPERAND, st.integers(0, 2**32))
def test_a_wrong_step_is_carried_on(a: int, b: int, seed: int) -> None:
    text = worked_answer(a, b, random.Random(seed), step_error=0.5)
    steps, _, answer = text.partition(":")
    carry, digits = 0, ""
    for step in steps.split(","):
        terms, total = step.split("=")
        assert int(terms.split("+")[2]) == carry
        carry, digit = divmod(int(total), 10)
        digits = str(digit) + digits
    assert answer == str(int(str(carry) + digits))


def test_every_step_wrong_never_solves_a_one_digit_problem() -> None:
    rng = random.Random(0)
    assert all(score(worked_answer(3, 4, rng, step_error=1.0), 3, 4) == 0.0 for _ in range(50))


def test_errors_without_a_source_of_randomness_are_refused() -> None:
    with pytest.raises(ValueError, match=r"step_error=0\.1 needs an rng"):
        worked_answer(1, 2, step_error=0.1)
    with pytest.raises(ValueError, match=r"digit_error=0\.1 needs an rng"):
        direct_answer(1, 2, digit_error=0.1)


def test_demonstrations_hold_both_styles_and_the_errors_asked_for() -> None:
    rng = random.Random(0)
    worked = wrong = 0
    for _ in range(4000):
        text = demonstration(rng, 3, 4, direct_fraction=0.3, error=0.04)
        worked += is_worked(text)
        wrong += is_worked(text) and score(text, 3, 4) == 0.0
    # Binomial, 4000 draws: 0.70 +- 0.0073 and, of about 2800, 0.04 +- 0.0037; four deviations allowed.
    assert worked / 4000 == pytest.approx(0.70, abs=0.03)
    assert wrong / worked == pytest.approx(0.04, abs=0.015)


def test_digits_of_a_direct_answer_are_replaced() -> None:
    rng = random.Random(0)
    # Every digit is replaced by one of ten: of 1000 one-digit sums about 1 in 10 stays right (sd 0.0095).
    right = sum(score(direct_answer(3, 4, rng, digit_error=1.0), 3, 4) for _ in range(1000))
    assert right / 1000 == pytest.approx(0.1, abs=0.04)


@pytest.mark.parametrize("digits", [FAMILIAR_DIGITS, UNFAMILIAR_DIGITS, (1, 1)])
def test_operand_lengths(digits: tuple[int, int]) -> None:
    rng = random.Random(0)
    longest = set()
    for _ in range(500):
        lengths = sorted(len(str(n)) for n in sample_problem(rng, digits))
        assert lengths[1] - lengths[0] <= 1
        assert lengths[0] >= 1
        longest.add(lengths[1])
    assert longest == set(range(digits[0], digits[1] + 1))


@pytest.mark.parametrize("digits", [(0, 3), (4, 3), (-1, 2)])
def test_bad_digits_are_named(digits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"digits must be .*\({digits[0]}, {digits[1]}\)"):
        make_dataset(1, digits)


@pytest.mark.parametrize("completion", [":433", "6+7+0=13,8+4+1=13,3+0+1=04:433", "nonsense:433"])
def test_reward_of_a_right_answer(completion: str) -> None:
    assert score(completion, 386, 47) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        ":",
        "433",
        ":43",
        ":4330",
        ":0433",
        ":+433",
        ":-433",
        ": 433",
        ":433 ",
        ":433\n",
        ":4_33",
        ":433.0",
        ":4e2",
        "::433",
        ":433:433",
        ":12:433",
        ":433,",
        ":433<eos>",
        ":\u0664\u0663\u0663",  # Arabic-Indic digits, which int() and \d accept
        ":\uff14\uff13\uff13",  # full-width digits
        ":433\x00",
        ":" + "9" * 5000,  # int() refuses more than 4300 digits
        "\ud800:433\ud800",
        "386+47=433",
    ],
)
def test_reward_of_hostile_text_is_zero(completion: str) -> None:
    assert score(completion, 386, 47) == 0.0


@given(st.text(), OPERAND, OPERAND)
def test_no_text_makes_the_reward_fail(completion: str, a: int, b: int) -> None:
    assert score(completion, a, b) in (0.0, 1.0)


def test_reward_in_the_signature_of_trl() -> None:
    values = reward(completions=[":3", ":4"], a=[1, 1], b=[2, 2], prompts=["1+2=", "1+2="], completion_ids=[[1], [2]])
    assert values == [1.0, 0.0]


def test_reward_refuses_columns_of_other_lengths() -> None:
    with pytest.raises(ValueError, match="shorter"):
        reward([":3", ":4"], [1], [2, 2])


def test_dataset_is_determined_by_its_arguments() -> None:
    rows = make_dataset(64, (2, 5), seed=3)
    assert rows == make_dataset(64, (2, 5), seed=3)
    assert rows[:10] == make_dataset(10, (2, 5), seed=3)
    assert rows != make_dataset(64, (2, 5), seed=4)
    assert rows != make_dataset(64, (2, 6), seed=3)
    assert all(row["prompt"] == f"{row['a']}+{row['b']}=" for row in rows)


def test_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        make_dataset(0)


# tokenizer


@given(st.text(alphabet=CHARACTERS))
def test_tokenizer_round_trip(text: str) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == encode(text)
    assert tokenizer.decode(ids) == text


def test_tokenizer_pads_left_and_hides_special_tokens() -> None:
    tokenizer = make_tokenizer()
    encoded = tokenizer(["1+2=", "12+3="], padding=True)
    assert encoded["input_ids"][0] == [PAD_ID, *encode("1+2=")]
    assert encoded["attention_mask"][0] == [0, 1, 1, 1, 1]
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert tokenizer.decode([PAD_ID, *encode(":3"), EOS_ID, PAD_ID], skip_special_tokens=True) == ":3"
    assert tokenizer.chat_template is None


def test_tokenizer_refuses_other_characters() -> None:
    with pytest.raises(Exception, match="UNK"):
        make_tokenizer()("what is 1+2?")


# training data


def test_packed_rows_hold_every_demonstration_once() -> None:
    recipe = RECIPES["dense"]
    pairs = draw_demonstrations(random.Random(0), recipe, 64)
    batch = pack(pairs, recipe.row_length)
    assert batch.input_ids.shape == batch.position_ids.shape == batch.targets.shape
    assert batch.input_ids.shape[1] == recipe.row_length
    found = []
    for ids, positions, targets in zip(
        batch.input_ids.tolist(), batch.position_ids.tolist(), batch.targets.tolist(), strict=True
    ):
        starts = [i for i, p in enumerate(positions) if p == 0] + [len(ids)]
        for start, end in zip(starts, starts[1:], strict=False):
            if ids[start] == PAD_ID:
                assert set(targets[start:end]) == {IGNORED}
                continue
            answer = [t for t in targets[start:end] if t != IGNORED]
            prompt = ids[start : end - len(answer) + 1]
            assert ids[start:end] == prompt + answer[:-1]
            found.append((prompt, answer))
    assert sorted(found) == sorted(pairs)
    assert (batch.input_ids != PAD_ID).double().mean() > 0.8


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_longest_demonstration_fits_a_row(kind: str) -> None:
    pair = (encode(format_prompt(99999, 99999)), [*encode(worked_answer(99999, 99999)), EOS_ID])
    assert pack([pair], RECIPES[kind].row_length).input_ids.shape[0] == 1


def test_row_too_short_for_a_demonstration_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 7 tokens, but row_length is 6"):
        pack([(encode("1+2="), [*encode(":10"), EOS_ID])], row_length=6)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_packing_does_not_change_the_logits(kind: str) -> None:
    torch.manual_seed(0)
    model = build_model(replace(TWO_STEPS[kind], initializer_range=0.2)).eval()
    pairs = draw_demonstrations(random.Random(1), RECIPES[kind], 6)
    batch = pack(pairs, 72)
    assert len(batch.input_ids) < len(pairs)
    with torch.no_grad():
        packed = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        for row in range(len(batch.input_ids)):
            positions = batch.position_ids[row].tolist()
            starts = [i for i, p in enumerate(positions) if p == 0] + [len(positions)]
            for start, end in zip(starts, starts[1:], strict=False):
                alone = model(input_ids=batch.input_ids[row : row + 1, start:end], use_cache=False).logits[0]
                torch.testing.assert_close(packed[row, start:end], alone, atol=1e-4, rtol=1e-4)


# checkpoints


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_model_and_tokenizer_have_one_vocabulary(kind: str) -> None:
    model = build_model(RECIPES[kind])
    size = len(make_tokenizer())
    assert size == len(VOCABULARY) == len(CHARACTERS) + 2
    assert model.config.vocab_size == model.lm_head.weight.shape[0] == size
    assert model.get_input_embeddings().weight.shape[0] == size


def test_standard_models_have_the_promised_shape() -> None:
    dense, moe = (build_model(RECIPES[kind]).config for kind in ("dense", "moe"))
    assert (dense.model_type, moe.model_type) == ("qwen3", "qwen3_moe")
    assert min(dense.num_hidden_layers, moe.num_hidden_layers) >= 4
    assert (moe.num_experts, moe.num_experts_per_tok) == (16, 4)
    assert moe.hidden_size % 32 == 0 and dense.head_dim == moe.head_dim == 32


def test_bad_recipe_names_the_field() -> None:
    with pytest.raises(ValueError, match="kind must be 'dense' or 'moe', got 'mamba'"):
        Recipe(kind="mamba", steps=1, batch_size=1, learning_rate=1e-3, initializer_range=0.02)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        Recipe(kind="dense", steps=0, batch_size=1, learning_rate=1e-3, initializer_range=0.02)


def test_cache_key_follows_every_field_of_the_recipe() -> None:
    base = TWO_STEPS["dense"]
    changed = {f.name: replace(base, **{f.name: _other(getattr(base, f.name))}) for f in fields(Recipe)}
    keys = {name: cache_key(recipe) for name, recipe in changed.items()}
    assert cache_key(base) == cache_key(replace(base))
    assert cache_key(base) not in keys.values()
    assert len(set(keys.values())) == len(fields(Recipe))


def _other(value: object) -> object:
    if isinstance(value, str):
        return "moe" if value == "dense" else "dense"
    if isinstance(value, tuple):
        return (value[0], value[1] + 1)
    assert isinstance(value, int | float)
    return value + 1 if isinstance(value, int) else value / 2


def test_cache_key_follows_versions_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_key(RECIPES["dense"])
    with monkeypatch.context() as patch:
        patch.setattr(pretrain.transformers, "__version__", "0.0.0")
        assert cache_key(RECIPES["dense"]) != before
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0.0.0")
        assert cache_key(RECIPES["dense"]) != before
    with monkeypatch.context() as patch:
        patch.setattr(packing, "format_prompt", lambda a, b: f"{b}+{a}=")
        assert cache_key(RECIPES["dense"]) != before
    assert cache_key(RECIPES["dense"]) == before


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_trained_checkpoint_loads_as_any_other(kind: str, tmp_path: Path) -> None:
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    path = ensure_model(kind, tmp_path, seed=5, recipe=TWO_STEPS[kind], threads=1, progress=False)
    assert torch.equal(torch.random.get_rng_state(), state) and torch.get_num_threads() == threads

    model = AutoModelForCausalLM.from_pretrained(path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer("386+47=")["input_ids"] == encode("386+47=")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS_ID, PAD_ID)
    assert tokenizer.padding_side == "left"
    generation = GenerationConfig.from_pretrained(path)
    assert (generation.eos_token_id, generation.pad_token_id) == (EOS_ID, PAD_ID)

    record = json.loads((path / "training.json").read_text())
    assert record["recipe"]["seed"] == 5 and record["recipe"]["kind"] == kind
    assert record["cache_key"] in path.name
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    assert record["evaluation"]["samples"] == 4
    assert record["history"][-1]["step"] == 2
    assert "2 steps" in pretrain.summary(record)


def test_checkpoint_is_cached_and_seeded(tmp_path: Path) -> None:
    recipe = TWO_STEPS["dense"]
    first = ensure_model("dense", tmp_path / "a", recipe=recipe, threads=1, progress=False)
    written = os.stat(first / "model.safetensors").st_mtime_ns
    assert ensure_model("dense", tmp_path / "a", recipe=recipe, threads=1, progress=False) == first
    assert os.stat(first / "model.safetensors").st_mtime_ns == written
    again = ensure_model("dense", tmp_path / "b", recipe=recipe, threads=1, progress=False)
    other = ensure_model("dense", tmp_path / "b", seed=1, recipe=recipe, threads=1, progress=False)
    weights = [(path / "model.safetensors").read_bytes() for path in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]
    assert again.name == first.name != other.name


def test_interrupted_training_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    recipe = TWO_STEPS["dense"]
    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "evaluate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ensure_model("dense", tmp_path, recipe=recipe, threads=1, progress=False)
    assert list(tmp_path.iterdir()) == []
    path = ensure_model("dense", tmp_path, recipe=recipe, threads=1, progress=False)
    assert (path / "config.json").is_file()


def test_second_writer_of_the_same_checkpoint_yields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = TWO_STEPS["dense"]
    target = tmp_path / f"dense-seed0-{cache_key(recipe)}"
    train = pretrain.train

    def train_while_another_finishes(*args: object, **kwargs: object) -> object:
        target.mkdir()
        (target / "winner").touch()
        return train(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(pretrain, "train", train_while_another_finishes)
    assert ensure_model("dense", tmp_path, recipe=recipe, threads=1, progress=False) == target
    assert [p.name for p in target.iterdir()] == ["winner"]
    assert [p.name for p in tmp_path.iterdir()] == [target.name]


def test_bad_arguments_of_ensure_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind must be one of dense, moe, got 'large'"):
        ensure_model("large", tmp_path)
    with pytest.raises(ValueError, match="kind is 'dense', but the recipe's is 'moe'"):
        ensure_model("dense", tmp_path, recipe=TWO_STEPS["moe"])
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError, match=f"cache_dir {file} is not a directory"):
        ensure_model("dense", file, recipe=TWO_STEPS["dense"])


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_tiny_model(kind: str, tmp_path: Path) -> None:
    path = tiny_model(kind, tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(path)) == 16
    ids = torch.tensor([encode("386+47=")])
    with torch.no_grad():
        probabilities = model(ids).logits.softmax(-1)
    assert probabilities.max() > 0.2  # uniform would be 1/16

    paths = [path, tiny_model(kind, tmp_path / "same"), tiny_model(kind, tmp_path / "other", seed=1)]
    weights = [(p / "model.safetensors").read_bytes() for p in paths]
    assert weights[0] == weights[1] != weights[2]


def test_tiny_model_with_a_larger_vocabulary(tmp_path: Path) -> None:
    path = tiny_model("dense", tmp_path, extra_vocabulary=48)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.lm_head.weight.shape[0] == 64
    assert len(AutoTokenizer.from_pretrained(path)) == 16
