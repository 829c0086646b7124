"""The trainer's side of the doctor: each cause changes what it says, and leaves the model as it was."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mismatch_ext.adapters import cli
from mismatch_ext.adapters.doctor.blocks import HiddenStates, compared
from mismatch_ext.adapters.doctor.configs import engines_own
from mismatch_ext.adapters.doctor.examining import WINDOW
from mismatch_ext.adapters.doctor.sides import Run
from mismatch_ext.adapters.transformers.doctor import scorer as scorers
from mismatch_ext.adapters.transformers.doctor.causes import of_model
from mismatch_ext.adapters.transformers.doctor.models import load_model
from mismatch_ext.adapters.transformers.doctor.scorer import BATCH, LAYOUTS, Scorer
from mismatch_ext.adapters.vllm.doctor_blocks import Held, holding
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
)

from examples.arithmetic.tokenizer import EOS_ID
from mismatch_ext.doctor import Sample, diagnose, report
from mismatch_ext.doctor.diagnose import STANDS_OUT
from tests.models import tiny_model
from tests.oracle import FACTOR, float32_error


def sample(responses: int = 12) -> Sample:
    made = np.random.default_rng(0)
    lengths = made.integers(12, 30, responses)
    rows = tuple(tuple(int(token) for token in made.integers(2, 16, length)) for length in lengths)
    return Sample(
        prompts=((5, 12, 7, 13),) * responses,
        responses=rows,
        masks=tuple((True,) * (len(row) - 2) + (False, True) for row in rows),
        logprobs=tuple((0.0,) * len(row) for row in rows),
    )


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_each_cause_changes_the_oracle_and_leaves_the_model_as_it_was(kind: str, tmp_path: Path) -> None:
    model = load_model(tiny_model(kind, tmp_path / "model", tied=False))
    # An end, which may stand before a prompt as a template's extra token.
    model.generation_config.eos_token_id = EOS_ID
    scorer = Scorer(model, sample(), trainer_dtype="float32", engine_dtype="bfloat16")
    oracle = torch.log_softmax(scorer.scores.logits.double(), -1)
    picked = oracle.gather(-1, torch.from_numpy(scorer.sample.tokens)[:, None])[:, 0].numpy()
    alike = FACTOR * scorer.float32_error
    assert scorer.logprobs() == pytest.approx(picked, abs=alike)
    older = tiny_model(kind, tmp_path / "older", seed=1, tied=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    causes = of_model(scorer, [older])
    assert len({cause.key for cause in causes}) >= (20 if kind == "dense" else 22)
    plain = scorer.logprobs()
    for cause in causes:
        changed = cause.predict(cause.grid[0])
        assert np.isfinite(changed).all() and np.abs(changed - picked).max() > scorer.float32_error, cause.key
        assert cause.screen is not None
        screened = cause.screen(cause.grid[0])
        assert np.array_equal(np.isfinite(screened), scorer.sample.fits), cause.key
        assert screened[scorer.sample.fits] == pytest.approx(changed[scorer.sample.fits], abs=alike), cause.key
        assert cause.sentence(cause.grid[0]) and np.array_equal(scorer.logprobs(), plain)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    (window,) = [cause for cause in causes if cause.key == "sliding_window"]
    assert window.predict(4096.0) == pytest.approx(picked, abs=alike), "a window beyond the sequences hides nothing"


def as_if(model: Path, engine: Scorer) -> tuple[Sample, Scorer]:
    """Return the sample of a float32 engine that another scorer stands for, and the trainer's scorer of it."""
    values = iter(engine.logprobs().tolist())
    said = tuple(tuple(next(values) if kept else math.nan for kept in mask) for mask in engine.sample.masks)
    taken = replace(engine.sample, logprobs=said)
    return taken, Scorer(load_model(model), taken, trainer_dtype="float32", engine_dtype="float32")


@pytest.mark.parametrize(
    ("piece", "said"),
    [("lm_head", "lm_head of the engine"), ("model.norm", "norm of the engine"), ("", "adds 0.35 times")],
)
def test_an_old_piece_and_an_adapter_at_another_scale_are_named(piece: str, said: str, tmp_path: Path) -> None:
    new, old = (tiny_model("dense", tmp_path / f"{seed}", seed=seed, tied=False) for seed in (0, 1))
    model, older = load_model(new), load_model(old)
    with torch.no_grad():
        older.get_parameter("model.norm.weight").mul_(1.1)
        for name, parameter in model.named_parameters():
            if name.startswith(piece):
                parameter.lerp_(older.get_parameter(name), 1.0 if piece else 0.65)
    older.save_pretrained(old)  # type: ignore[operator]
    taken, trainer = as_if(new, Scorer(model, sample(96), trainer_dtype="float32", engine_dtype="float32"))
    found = diagnose(taken, trainer.scores, of_model(trainer, [old] if piece else [], None if piece else str(old)))
    (cause,) = found.causes
    assert said in cause.said and found.verdict == "explained", report(found)


@pytest.mark.parametrize(("engines", "said"), [(20, "sees 20 tokens"), (None, "sees all tokens, the trainer's 8")])
def test_a_window_of_the_engine_that_is_wider_than_the_trainers_is_named(
    engines: int | None, said: str, tmp_path: Path
) -> None:
    def folder(window: int | None) -> Path:
        made = tiny_model("dense", tmp_path / f"window{window}")
        config = json.loads((made / "config.json").read_text(encoding="utf-8"))
        config |= {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}
        config["layer_types"] = ["full_attention" if window is None else "sliding_attention"] * 2
        (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return made

    engine = Scorer(load_model(folder(engines)), sample(96), trainer_dtype="float32", engine_dtype="float32")
    sides = Run(model=str(folder(8)), engine_model=str(folder(engines)))
    taken, trainer = as_if(folder(8), engine)
    found = diagnose(taken, trainer.scores, of_model(trainer, windows=engines_own(sides, WINDOW)))
    (cause,) = found.causes
    assert cause.key == "sliding_window" and said in cause.said, cause.said
    assert found.verdict == "explained"


def test_logged_rollouts_are_examined_without_an_engine(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Log-probabilities of a float32 engine with sharper logits: what temperature 0.8 samples.
    plain = sample(48)
    scorer = Scorer(load_model(dense), plain, trainer_dtype="float32", engine_dtype="float32", temperature=0.8)
    values = iter(scorer.logprobs().tolist())
    rows = [
        {
            "prompt_ids": prompt,
            "response_ids": response,
            "response_mask": mask,
            "rollout_logprobs": [next(values) if kept else None for kept in mask],
        }
        for prompt, response, mask in zip(plain.prompts, plain.responses, plain.masks, strict=True)
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    given = ["doctor", "--model", str(dense), "--rollouts", str(path), "--dtype", "float32", "--out", str(tmp_path)]
    assert cli.main([*given, "--quick"]) == 1
    (cause,) = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))["causes"]
    assert cause["key"] == "temperature" and cause["parameter"] == pytest.approx(0.8, abs=0.001)
    assert cause["status"] == "fits" and "to fix temperature:" in capsys.readouterr().out
    # The gap is closed then, and tokens that were drawn evenly are still not this model's.
    assert cli.main([*given, "--quick", "--temperature", "0.8"]) == 3
    assert "tokens: not drawn from the trainer's distribution" in capsys.readouterr().out
    path.write_text("".join(f"{json.dumps(row | {'prompt_ids': [10**6]})}\n" for row in rows), encoding="utf-8")
    assert cli.main([*given, "--quick"]) == 2
    assert "token id 1000000 is beyond the vocabulary" in capsys.readouterr().err


def uneven(responses: int = 24) -> Sample:
    """Return a sample whose prompts are of several lengths, so that padding on the left moves positions."""
    prompts = tuple(tuple(range(2, 4 + row % 7)) for row in range(responses))
    return replace(sample(responses), prompts=prompts)


@pytest.mark.parametrize("layout", ["left", "left-positions", "packed"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_layout_is_the_same_policy_in_float32_and_rounds_otherwise(kind: str, layout: str, tmp_path: Path) -> None:
    model = load_model(tiny_model(kind, tmp_path / "model"))
    plain = Scorer(model, uneven(), trainer_dtype="bfloat16", engine_dtype="float32")
    laid = Scorer(model, uneven(), trainer_dtype="bfloat16", engine_dtype="float32", layout=layout)
    alike = FACTOR * plain.float32_error
    assert [rung.name for rung in laid.scores.rungs] == [f"batches of 1 against {BATCH}", LAYOUTS[layout]]
    for rung in laid.scores.rungs:
        assert not rung.changes_the_policy and (rung.float32 or 0) < alike < rung.mean, rung
    assert laid.scores.straight == pytest.approx(plain.scores.trainer, abs=alike)
    assert laid.scores.layout == LAYOUTS[layout] and np.abs(laid.scores.trainer - plain.scores.trainer).max() > alike


def test_a_head_in_float32_is_exact_under_autocast_and_leaves_the_weights(tmp_path: Path) -> None:
    model = load_model(tiny_model("dense", tmp_path / "model"))
    before = model.get_output_embeddings().weight.detach().bfloat16().clone()
    # Weights in bfloat16 without autocast are what the doctor holds the engine's arithmetic to.
    held = {"engine_dtype": "bfloat16", "trainer_weights": "bfloat16"}
    plain = Scorer(model, sample(), trainer_dtype="float32", **held).scores
    exact = Scorer(model, sample(), trainer_dtype="float32", head="float32", **held).scores
    assert plain.headed is not None and np.array_equal(plain.trainer, plain.own)
    assert np.array_equal(exact.trainer, plain.headed) and not np.array_equal(plain.headed, plain.own)
    # Logits that autocast leaves on bfloat16's grid are what the option takes away.
    scorer = Scorer(model, sample(), trainer_dtype="bfloat16", engine_dtype="bfloat16", head="float32")
    with scorer.as_trainer():
        ((_, logits), *_) = scorer._passes(scorer.sample, None, only=[0])
    assert logits.dtype == torch.float32 and not torch.equal(logits, logits.bfloat16().float())
    assert torch.equal(model.get_output_embeddings().weight, before.float())


def test_logits_that_are_capped_after_the_head_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "KEPT", 0)
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=32,
        num_key_value_heads=1, final_logit_softcapping=1.0, initializer_range=0.2,
    )  # fmt: skip
    scorer = Scorer(Gemma2ForCausalLM(config).eval(), sample(), trainer_dtype="float32", engine_dtype="float32")
    assert isinstance(scorer.scores.logits, torch.Tensor) and scorer.scores.logits.abs().max() <= 1


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_block_that_computes_otherwise_is_found_on_its_own_input(kind: str, tmp_path: Path) -> None:
    folder = tiny_model(kind, tmp_path / "model")
    scorer = Scorer(load_model(folder), sample(), trainer_dtype="bfloat16", engine_dtype="bfloat16")
    # An engine that is transformers in bfloat16, whose first MLP says too much.
    engine = load_model(folder).bfloat16()
    rows = [[*scorer.sample.prompts[row], *scorer.sample.responses[row]] for row in range(6)]

    def seen() -> list[Held]:
        found = []
        for ids in rows:
            held: Held = {}
            with torch.no_grad(), holding(engine, held):
                engine(torch.tensor([ids]))
            found.append({at: (x[0], y.reshape(-1, y.shape[-1])) for at, (x, y) in held.items()})
        return found

    blocks = compared(scorer, HiddenStates(rows=rows, blocks=seen()))
    assert len(blocks) == 4 and max(block.ratio for block in blocks) < 1.2, blocks
    engine.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 1.1)
    blocks = compared(scorer, HiddenStates(rows=rows, blocks=seen()))
    (out,) = [block for block in blocks if block.ratio > STANDS_OUT]
    assert (out.layer, out.kind) == (0, "mlp") and out.error == pytest.approx(0.1, rel=0.1)


def last_place(model: Any, ids: torch.Tensor) -> float:
    """Return one last place of float32 at the size of the largest logit or log-probability."""
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    largest = max(float(logits.abs().max()), float(logits.log_softmax(-1).abs().max()))
    return torch.finfo(torch.float32).eps * largest


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(("size", "clean"), [(2.0, True), (30.0, False)])
@pytest.mark.parametrize("sharper", [0.1, 20.0])
def test_a_float32_pair_is_judged_by_this_models_own_rounding(
    kind: str, sharper: float, size: float, clean: bool, tmp_path: Path
) -> None:
    model = load_model(tiny_model(kind, tmp_path / "model", tied=False))
    # Larger logits round more: no number of nats is rounding for both models.
    with torch.no_grad():
        model.lm_head.weight.mul_(sharper)
    tokens = sample(64)
    scorer = Scorer(model, tokens, trainer_dtype="float32", engine_dtype="float32")
    ids = torch.randint(2, 16, (4, 24), generator=torch.Generator().manual_seed(0))
    everywhere = torch.ones_like(ids)
    unit = max(float32_error(model, ids, everywhere, everywhere), last_place(model, ids))
    noise = np.random.default_rng(0).normal(size=len(tokens.row))
    values = iter(scorer.scores.trainer + size * unit * noise)
    logprobs = tuple(tuple(float(next(values)) if kept else 0.0 for kept in mask) for mask in tokens.masks)
    found = diagnose(replace(tokens, logprobs=logprobs), scorer.scores)
    # The tokens themselves are sampled by nobody, so only the log-probabilities are judged.
    assert (found.unexplained == 0) == clean, report(found)


def test_a_model_too_large_for_float64_is_measured_by_another_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_model("dense", tmp_path / "model"))
    exact = Scorer(model, sample(), trainer_dtype="float32", engine_dtype="float32").float32_error
    monkeypatch.setattr(scorers, "FLOAT64_PARAMETERS", 0)
    estimated = Scorer(model, sample(), trainer_dtype="float32", engine_dtype="float32").float32_error
    assert 1 / FACTOR < estimated / exact < FACTOR
