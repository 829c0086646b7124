"""An adapter in the place of a checkpoint: merged with its base model, and an engine without it is told from other weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from mismatch_ext.adapters.doctor.prompts import read_prompts
from mismatch_ext.adapters.transformers.doctor.causes import of_model
from mismatch_ext.adapters.transformers.doctor.models import ensure_checkpoint, load_model
from mismatch_ext.adapters.transformers.doctor.scorer import Scorer
from mismatch_ext.adapters.transformers.peft_adapters import base_of, served
from transformers import AutoModelForCausalLM

from mismatch_ext.doctor import Sample, diagnose, report
from mismatch_ext.errors import ConfigError
from tests.models import tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("dense", tmp_path_factory.mktemp("base") / "dense")


def saved(base: Path, folder: Path, *, seed: int = 0, config: Any = None) -> Path:
    """Save an adapter whose weights are random."""
    torch.manual_seed(seed)
    asked = config or peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), asked)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(folder)
    return folder


def sample(responses: int = 48) -> Sample:
    made = np.random.default_rng(0)
    rows = tuple(tuple(made.integers(2, 16, int(length)).tolist()) for length in made.integers(12, 30, responses))
    return Sample(
        prompts=((5, 12, 7, 13),) * responses,
        responses=rows,
        masks=tuple((True,) * len(row) for row in rows),
        logprobs=tuple((0.0,) * len(row) for row in rows),
    )


def named(trainer: Path, engine: Path, older: tuple[Path, ...] = ()) -> str:
    """Return what is said of a float32 engine that has other weights than the trainer."""
    asked = Scorer(load_model(engine), sample(), trainer_dtype="float32", engine_dtype="float32")
    values = iter(asked.logprobs().tolist())
    taken = replace(sample(), logprobs=tuple(tuple(next(values) for _ in row) for row in sample().responses))
    scorer = Scorer(load_model(trainer), taken, trainer_dtype="float32", engine_dtype="float32")
    causes = [cause for cause in of_model(scorer, older, base_of(trainer)) if cause.family == "weights"]
    found = diagnose(taken, scorer.scores, causes)
    assert len(found.causes) == 1, report(found)
    return found.causes[0].said


def test_what_the_engine_served_in_its_place_is_named(base: Path, tmp_path: Path) -> None:
    first, last = saved(base, tmp_path / "first"), saved(base, tmp_path / "last", seed=1)
    assert named(last, base) == f"the engine has the weights of {base}: the adapter is not applied"
    assert named(last, first, (first,)) == f"the engine has the weights of {first}"
    assert base_of(base) is None and base_of(last) == str(base)


def test_an_adapter_is_merged_as_it_computes(base: Path, tmp_path: Path) -> None:
    folder = saved(base, tmp_path / "adapter")
    apart: Any = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
    ids = torch.arange(2, 16)[None]
    with torch.no_grad():
        expected, plain = apart(ids).logits, load_model(base)(ids).logits
        whole = load_model(folder)
        assert torch.allclose(whole(ids).logits, expected, atol=1e-5) and (plain - expected).abs().max() > 0.1
        with served(str(folder), "--model") as written:
            assert torch.equal(load_model(written)(ids).logits, whole(ids).logits)
            kept = Path(written)
            assert (
                read_prompts_of(kept, tmp_path) == read_prompts_of(folder, tmp_path) == read_prompts_of(base, tmp_path)
            )
    assert not kept.exists() and all(parameter.requires_grad for parameter in whole.parameters())
    with served(str(base), "--model") as written:
        assert written == str(base)


def read_prompts_of(model: Path, tmp_path: Path) -> list[list[int]]:
    (tmp_path / "prompts.txt").write_text("1+2=\n", encoding="utf-8")
    return read_prompts(tmp_path / "prompts.txt", str(model))


def test_what_cannot_be_merged_is_named(base: Path, tmp_path: Path) -> None:
    folder = saved(base, tmp_path / "adapter")
    said = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))

    def written(base: Any) -> None:
        (folder / "adapter_config.json").write_text(
            json.dumps({**said, "base_model_name_or_path": base}), encoding="utf-8"
        )

    written(str(tmp_path / "none"))
    with pytest.raises(
        ConfigError, match=r"--older: .*none, the base model of the adapter .*adapter, cannot be loaded"
    ):
        ensure_checkpoint("--older", folder)
    written(str(tiny_model("moe", tmp_path / "moe")))
    with pytest.raises(ConfigError, match=r"--model: .*adapter cannot be merged into .*moe"):
        load_model(folder)
    virtual = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match="a PROMPT_TUNING adapter has no weights to merge"):
        load_model(saved(base, tmp_path / "virtual", config=virtual))
