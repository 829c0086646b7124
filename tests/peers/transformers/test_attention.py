"""Attention without a model's soft cap: it is measured, named as the trainer's, and no fault of a healthy run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mismatch_ext.adapters import cli
from mismatch_ext.adapters.doctor.options import ATTENTIONS
from mismatch_ext.adapters.transformers.attention import (
    PORTABLE,
    attending_by,
    complete_implementation,
    dropped_cap,
    implementation_of,
    trainer_implementation,
)
from mismatch_ext.adapters.transformers.doctor.models import load_model
from mismatch_ext.adapters.transformers.doctor.scorer import Scorer
from mismatch_ext.adapters.transformers.scoring import score_tokens
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
)

from examples.arithmetic.tokenizer import EOS_ID, PAD_ID
from mismatch_ext.doctor import Sample
from mismatch_ext.errors import ConfigError
from tests.models import tiny_gemma2, tiny_model

PROBES = torch.randint(2, 16, (8, 32), generator=torch.Generator().manual_seed(0))
PROMPT = (5, 12, 7, 13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_soft_cap_that_sdpa_drops_is_measured(dtype: torch.dtype, tmp_path: Path) -> None:
    model: Any = load_model(tiny_gemma2(tmp_path)).to(dtype)
    before = score_tokens(model, PROBES)
    assert implementation_of(model) == "sdpa", "what transformers takes for Gemma-2"
    dropped = dropped_cap(model, lambda: score_tokens(model, PROBES))
    assert dropped is not None and dropped.moved is not None and dropped.moved > 0.05
    assert (dropped.implementation, dropped.cap, dropped.tokens) == ("sdpa", 5.0, 8 * 31)
    assert "(sdpa) has no soft cap" in str(dropped) and "attn_implementation: eager" in str(dropped)
    assert implementation_of(model) == "sdpa" and torch.equal(score_tokens(model, PROBES), before)
    with attending_by(model, "eager"):
        assert dropped_cap(model, lambda: score_tokens(model, PROBES)) is None


def test_the_oracle_attends_by_all_of_the_model_and_the_trainer_by_what_the_run_has(tmp_path: Path) -> None:
    assert ATTENTIONS == PORTABLE
    gemma = load_model(tiny_gemma2(tmp_path / "gemma2"))
    assert complete_implementation(gemma) == "eager"
    for asked, taken in (("", "sdpa"), ("sdpa", "sdpa"), ("eager", "eager"), ("flash_attention_2", "eager")):
        assert trainer_implementation(gemma, asked) == taken
    dense = load_model(tiny_model("dense", tmp_path / "dense"))
    assert trainer_implementation(dense, "flash_attention_2") == "sdpa"
    # A model with sinks has no sdpa in transformers.
    sinks = GptOssForCausalLM(
        GptOssConfig(
            vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1, pad_token_id=PAD_ID,
        )
    )  # fmt: skip
    assert complete_implementation(sinks) == "eager"
    with pytest.raises(ConfigError, match="attention 'sdpa' does not run with GptOssForCausalLM"):
        trainer_implementation(sinks, "sdpa")


def drawn(folder: Path, rows: int = 24) -> Sample:
    """Return responses that an engine with the soft cap samples, and their log-probabilities."""
    model: Any = load_model(folder)
    model.set_attn_implementation("eager")
    torch.manual_seed(0)
    whole = model.generate(
        torch.tensor([PROMPT] * rows), do_sample=True, top_k=0, max_new_tokens=24, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )  # fmt: skip
    responses = []
    for row in whole[:, len(PROMPT) :].tolist():
        length = row.index(EOS_ID) + 1 if EOS_ID in row else len(row)
        responses.append(tuple(row[:length]))
    sample = Sample(
        prompts=(PROMPT,) * rows,
        responses=tuple(responses),
        masks=tuple((True,) * len(row) for row in responses),
        logprobs=tuple((0.0,) * len(row) for row in responses),
    )
    values = iter(Scorer(model, sample, trainer_dtype="float32", engine_dtype="float32").logprobs().tolist())
    return replace(sample, logprobs=tuple(tuple(next(values) for _ in row) for row in responses))


def written(sample: Sample, path: Path) -> Path:
    lines = [
        {
            "prompt_ids": prompt,
            "response_ids": response,
            "rollout_logprobs": logprobs,
            "provenance": {"dtype": "float32"},
        }
        for prompt, response, logprobs in zip(sample.prompts, sample.responses, sample.logprobs, strict=True)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def test_a_log_of_gemma_2_is_clean_with_eager_and_names_the_trainers_sdpa(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_gemma2(tmp_path / "model")
    log = written(drawn(folder), tmp_path / "rollouts.jsonl")
    asked = ["doctor", "--model", str(folder), "--rollouts", str(log), "--quick", "--out", str(tmp_path / "out")]
    assert cli.main([*asked, "--trainer-attention", "eager"]) == 0, capsys.readouterr().out
    assert "Clean" in capsys.readouterr().out
    assert cli.main(asked) == 1
    page = capsys.readouterr().out
    (cause,) = json.loads((tmp_path / "out/doctor.json").read_text(encoding="utf-8"))["causes"]
    assert (cause["key"], cause["family"], cause["status"]) == ("attention", "trainer", "measured"), page
    assert "the trainer's attention (sdpa) has no soft cap" in page and 'attn_implementation="eager"' in page
    assert "refuted" not in page and "Explained" in page, page
