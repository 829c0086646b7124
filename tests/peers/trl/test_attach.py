"""`attach`: stock trainers of the real TRL, measured, and what they compute left as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT
from tests.cpu import without_float16_packing
from tests.peers.scenarios import Run, named
from tests.peers.trl.ranks import launch

scenarios = named("tests.peers.trl.scenarios_attach")
ranks = named("tests.peers.trl.scenarios_attach_ranks")

pytestmark = pytest.mark.engine
OURS = ("measured", "verdict", "events", "dropped")


def pair(run: Run, model: Path, out: Path, **given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a run leaves alone and measured, where stock TRL can update its engine."""
    limits = without_float16_packing()
    stock, measured = (
        run(
            scenarios.train, model=model, out=out / str(attached), attached=attached, env=limits, fresh=bool(limits), **given
        ).expect()
        for attached in (False, True)
    )  # fmt: skip
    return stock, measured


@pytest.mark.numeric
@pytest.mark.parametrize(
    "given",
    [
        {},
        {
            "cls": "mine",
            "vllm_importance_sampling_correction": False,
            "gradient_checkpointing": True,
            "model_init_kwargs": {"dtype": "float32", "attention_dropout": 0.5},  # not in the pass that measures
        },
    ],
    ids=["stock", "subclass-without-correction"],
)
def test_measuring_changes_no_bit(run: Run, dense_fp16: Path, tmp_path: Path, given: dict[str, Any]) -> None:
    stock, measured = pair(run, dense_fp16, tmp_path, **given)
    of_ours = {name: measured.pop(name) for name in OURS}
    assert measured == stock
    assert len(stock["logged"]) == 4 and any(entry.get("grad_norm") for entry in stock["logged"])

    *logged, evaluated = of_ours["measured"]
    gaps = [entry["mismatch/logp_abs_diff_mean"] for entry in logged if "mismatch/logp_abs_diff_mean" in entry]
    assert len(gaps) == 3 and 0 < min(gaps) <= max(gaps) < 0.01
    # TRL's default correction, here a truncation of tokens, masks nothing; without it there is nothing to count.
    masked = [entry.get("mismatch/masked_token_frac") for entry in logged]
    assert masked == ([None] * 3 if given else [0.0] * 3)
    assert evaluated["eval_mismatch/tokens"] > 0 and logged[-1]["mismatch/weight_sync_gap"] > 0
    assert of_ours["verdict"] in ("in_sync", "unchanged")
    events = [name for name, _ in of_ours["events"] if name not in ("alarm", "vocabulary")]
    assert events == (["dropout"] if given else [])


def test_a_lost_weight_update_shows(run: Run, dense: Path, tmp_path: Path) -> None:
    mask = {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.2}
    healthy, lost = (
        run(scenarios.train, model=dense, out=tmp_path / str(lost), attached=True, lost=lost, **mask).expect()
        for lost in (False, True)
    )
    # Both have sampled with the weights of the same first update; from the second one on the engine is behind.
    first, *later = (
        [found["measured"][step]["mismatch/logp_abs_diff_mean"] for found in (healthy, lost)] for step in range(3)
    )
    assert first[0] == first[1]
    assert all(stale > 4 * fresh for fresh, stale in later), later
    # TRL's mask drops whole responses, and we log those that it drops.
    dropped = [[entry["mismatch/masked_seq_frac"] for entry in found["measured"][:3]] for found in (healthy, lost)]
    assert dropped == [found["dropped"][:3] for found in (healthy, lost)] and any(map(any, dropped))
    assert healthy["verdict"] == "in_sync" and lost["verdict"] == "stale"
    assert not any(name == "check_failed" for name, _ in healthy["events"])
    events = [message for name, message in lost["events"] if name == "check_failed"]
    # Of the second update that is missed, and before the evaluation: one alone is doubted, and the next one is asked.
    assert len(events) == 2 and all("'weight_sync' failed" in message and "stale" in message for message in events), (
        events
    )


def test_an_engine_that_sleeps_is_asked_awake(run: Run, dense: Path, tmp_path: Path) -> None:
    for loses in ("", "cos_sin_cache"):
        run(scenarios.sleeping, model=dense, out=tmp_path / f"run{loses}", loses=loses).expect()


def test_a_setting_that_a_block_refuses_warns(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.at_two_temperatures, model=dense, out=tmp_path).expect()


def test_what_it_cannot_serve_is_refused(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.refused, model=dense, out=tmp_path).expect()


def test_the_first_block_of_the_page_on_trl(run: Run, dense: Path, tmp_path: Path) -> None:
    (block, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/trl.md").read_text(encoding="utf-8"), flags=re.S)
    for stands_there, here in (('"Qwen/Qwen3-0.6B"', f'"{dense}"'), ('"run"', f'"{tmp_path}"')):
        assert stands_there in block
        block = block.replace(stands_there, here)
    run(scenarios.documented, model=dense, out=tmp_path, block=block).expect()


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_two_ranks(run: Run, kind: str, dense_fp16: Path, tmp_path: Path) -> None:
    launch(run, kind, ranks.attached, tmp_path, env=without_float16_packing(), model=dense_fp16).expect()


def test_weights_that_trl_did_not_send_are_noticed_when_it_samples(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.unsent, model=dense, out=tmp_path).expect()


def test_evidence_is_not_kept_in_a_folder_that_is_uploaded(run: Run, tmp_path: Path) -> None:
    run(scenarios.published, out=tmp_path / "out").expect()
