"""Which checkpoints of transformers' Trainer and of verl are whole, with the files that both write, torn at every place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from mismatch_ext.adapters.transformers import whole as trainer
from safetensors.torch import save_file

from mismatch_ext.errors import RecordError


def trainer_checkpoint(out: Path, step: int) -> Path:
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"w": torch.arange(50.0)}, folder / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.arange(50.0)}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def tear(path: Path, part: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])


def test_the_last_whole_checkpoint_is_found_by_its_step(tmp_path: Path) -> None:
    for step in (2, 9, 10):
        trainer_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-11.bak").mkdir()
    assert trainer.last_whole(tmp_path) == (tmp_path / "checkpoint-10", {})
    assert trainer.resumable(True, tmp_path) == (str(tmp_path / "checkpoint-10"), [])
    shutil.rmtree(tmp_path / "checkpoint-10")
    assert trainer.last_whole(tmp_path)[0] == tmp_path / "checkpoint-9"


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
def test_a_file_cut_off_anywhere_is_seen_and_the_one_before_resumed(tmp_path: Path, name: str, part: float) -> None:
    trainer_checkpoint(tmp_path, 9)
    torn = trainer_checkpoint(tmp_path, 10)
    tear(torn / name, part)
    chosen, (message,) = trainer.resumable(True, tmp_path)
    assert chosen == str(tmp_path / "checkpoint-9")
    assert f"checkpoint-10: its {name} is cut off" in message and str(torn) in message
    assert torn.is_dir() and (torn / name).exists()  # nothing is deleted
    with pytest.raises(RecordError, match=f"its {name} is cut off") as error:
        trainer.resumable(str(torn), tmp_path)
    assert f"Resume from '{tmp_path / 'checkpoint-9'}'" in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [("trainer_state.json", "has no trainer_state.json"), ("checkpoint-is-incomplete.txt", "holds checkpoint-is")],
)
def test_what_was_begun_and_not_finished_is_not_whole(tmp_path: Path, name: str, words: str) -> None:
    folder = trainer_checkpoint(tmp_path, 1)
    (folder / name).unlink() if (folder / name).exists() else (folder / name).touch()
    fault = trainer.fault_of(folder)
    assert fault is not None and words in fault
    with pytest.raises(RecordError, match="no checkpoint in") as error:
        trainer.resumable(True, tmp_path)
    assert f"Delete {folder} and train without resume_from_checkpoint" in str(error.value)


def test_without_checkpoints_the_trainer_decides(tmp_path: Path) -> None:
    for asked in (None, False, True, "elsewhere"):
        assert trainer.resumable(asked, tmp_path / "new") == (asked, [])


def verl_checkpoint(out: Path, step: int, world: int = 2) -> Path:
    folder = out / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    for rank in range(world):
        for name in ("model", "optim", "extra_state"):
            torch.save({"state": torch.arange(50.0)}, folder / f"actor/{name}_world_size_{world}_rank_{rank}.pt")
    torch.save({"state": 1}, folder / "data.pt")
    (out / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


@pytest.fixture
def verl() -> object:
    return pytest.importorskip("mismatch_ext.adapters.verl.whole")


def test_verls_own_choice_stands_where_it_is_whole(tmp_path: Path, verl: object) -> None:
    assert verl.resumable(tmp_path) == (None, None)  # type: ignore[attr-defined]
    verl_checkpoint(tmp_path, 1)
    verl_checkpoint(tmp_path, 2)
    (tmp_path / "global_step_3/actor").mkdir(parents=True)  # begun, and not named yet
    assert verl.resumable(tmp_path) == (None, None)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("torn", "words"),
    [
        ("latest_checkpointed_iteration.txt", "holds '', which is no step"),
        ("global_step_2/data.pt", "its data.pt is cut off"),
        ("global_step_2/actor/model_world_size_2_rank_1.pt", "is cut off"),
        ("-global_step_2/actor/optim_world_size_2_rank_1.pt", "its actor/optim lacks rank 1 of 2"),
        ("-global_step_2/actor", "its folder actor has no files"),
        ("-global_step_2/data.pt", "it has no data.pt"),
        ("-global_step_2", "it is not there"),
    ],
)
def test_verl_resumes_the_last_whole_one(tmp_path: Path, verl: object, torn: str, words: str) -> None:
    before = verl_checkpoint(tmp_path, 1)
    verl_checkpoint(tmp_path, 2)
    path = tmp_path / torn.removeprefix("-")
    if not torn.startswith("-"):
        tear(path, 0.0)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    chosen, message = verl.resumable(tmp_path)  # type: ignore[attr-defined]
    named = torn.endswith(".txt")
    assert chosen == (tmp_path / "global_step_2" if named else before) and words in message
    shutil.rmtree(before)
    if named or torn == "-global_step_2":
        return
    with pytest.raises(RecordError, match="no other checkpoint in") as error:
        verl.resumable(tmp_path)  # type: ignore[attr-defined]
    assert "latest_checkpointed_iteration.txt and global_step_2" in str(error.value)
