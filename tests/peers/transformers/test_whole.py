"""Which checkpoints of transformers' Trainer are whole, with the files that it writes, torn at every place."""

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


def test_files_of_others_do_not_count(tmp_path: Path) -> None:
    folder = trainer_checkpoint(tmp_path, 1)
    (folder / "mine.pt").write_text("no archive")
    (folder / "scaler.pt").touch()
    assert trainer.fault_of(folder) == "its scaler.pt is cut off"
    (folder / "scaler.pt").unlink()
    assert trainer.fault_of(folder) is None


def test_without_checkpoints_the_trainer_decides(tmp_path: Path) -> None:
    for asked in (None, False, True, "elsewhere"):
        assert trainer.resumable(asked, tmp_path / "new") == (asked, [])
