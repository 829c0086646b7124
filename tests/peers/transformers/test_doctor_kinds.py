"""The doctor on kinds of models that the shipped ones are not: hybrids in packed rows, and models with images on text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mismatch_ext.adapters import cli
from mismatch_ext.adapters.placeholders import placeholders_of
from mismatch_ext.adapters.transformers.doctor.scorer import mixes_packed
from transformers import AutoConfig, AutoModelForCausalLM

from mismatch_ext.doctor import read_rollouts
from mismatch_ext.errors import RecordError
from mismatch_ext.evidence import ColumnBatch, lines_of

ROWS, PROMPT, LENGTH = 48, 4, 24
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
         "pad_token_id": 0}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 32},
}


def model(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **KINDS[kind])).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_models_whose_state_runs_on_in_a_packed_row_are_told_by_trying(kind: str) -> None:
    assert mixes_packed(model(kind)) == (kind != "qwen3")


def test_a_healthy_hybrid_is_not_blamed_on_packing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hybrid = model("lfm2")
    hybrid.save_pretrained(tmp_path / "model")
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (ROWS, PROMPT), generator=made)
    with torch.no_grad():
        for _ in range(LENGTH):
            drawn = hybrid(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(drawn, 1, generator=made)], 1)
        scores = (
            hybrid(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        )
    rows = [{"prompt_ids": row[:PROMPT], "response_ids": row[PROMPT:], "rollout_logprobs": logprobs[PROMPT - 1 :]}
            for row, logprobs in zip(ids.tolist(), scores.tolist(), strict=True)]  # fmt: skip
    path = tmp_path / "rollouts.jsonl"
    path.write_text(
        "".join(f"{json.dumps(row | {'response_mask': [True] * LENGTH})}\n" for row in rows), encoding="utf-8"
    )
    given = ["--model", str(tmp_path / "model"), "--rollouts", str(path), "--dtype", "float32", "--out", str(tmp_path)]
    assert cli.main(["doctor", *given, "--trainer-layout", "packed", "--quick"]) == 0
    assert "packed rows were not rebuilt" in capsys.readouterr().out


def test_responses_to_images_are_left_out(tmp_path: Path) -> None:
    """TRL counts a prompt's images, and a model's configuration names the tokens that stand for them."""
    batch = ColumnBatch(
        prompts=[[1, 2], [1, 9], [3, 4], [5, 6]], responses=[[7]] * 4, rollout=[[-1.0]] * 4, pictures=[0, 0, 1, 0]
    )
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines_of(batch, "an alarm")), encoding="utf-8")
    logged = read_rollouts(path)
    placeholders = placeholders_of({"image_token_id": 9})
    kept = logged.of_text(placeholders)
    assert [row.prompt_ids for row in kept.responses] == [(1, 2), (5, 6)] and kept.left_out == 2
    with pytest.raises(RecordError, match="every prompt has an image"):
        logged.of_text([*placeholders, 1, 5])
