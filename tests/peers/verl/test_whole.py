"""Which of verl's checkpoints are whole, with the files that it writes, torn at every place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from mismatch_ext.adapters.verl.driver.whole import resumable

from mismatch_ext.errors import RecordError


def tear(path: Path, part: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])


def verl_checkpoint(out: Path, step: int, world: int = 2) -> Path:
    folder = out / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    for rank in range(world):
        for name in ("model", "optim", "extra_state"):
            torch.save({"state": torch.arange(50.0)}, folder / f"actor/{name}_world_size_{world}_rank_{rank}.pt")
    torch.save({"state": 1}, folder / "data.pt")
    (out / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def test_verls_own_choice_stands_where_it_is_whole(tmp_path: Path) -> None:
    assert resumable(tmp_path) == (None, None)
    verl_checkpoint(tmp_path, 1)
    verl_checkpoint(tmp_path, 2)
    (tmp_path / "global_step_3/actor").mkdir(parents=True)  # begun, and not named yet
    assert resumable(tmp_path) == (None, None)


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
def test_verl_resumes_the_last_whole_one(tmp_path: Path, torn: str, words: str) -> None:
    before = verl_checkpoint(tmp_path, 1)
    verl_checkpoint(tmp_path, 2)
    path = tmp_path / torn.removeprefix("-")
    if not torn.startswith("-"):
        tear(path, 0.0)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    chosen, message = resumable(tmp_path)
    named = torn.endswith(".txt")
    assert chosen == (tmp_path / "global_step_2" if named else before) and words in message
    shutil.rmtree(before)
    if named or torn == "-global_step_2":
        return
    with pytest.raises(RecordError, match="no other checkpoint in") as error:
        resumable(tmp_path)
    assert "latest_checkpointed_iteration.txt and global_step_2" in str(error.value)


def test_what_was_in_flight_belongs_to_a_checkpoint_once_it_was_begun(tmp_path: Path) -> None:
    before, last = verl_checkpoint(tmp_path, 1), verl_checkpoint(tmp_path, 2)
    (last / "transfer_queue.tmp").mkdir()  # of the next writing, which has not ended
    (last / "transfer_queue").mkdir()
    assert resumable(tmp_path) == (None, None)
    (last / "transfer_queue").rmdir()
    chosen, message = resumable(tmp_path)
    assert chosen == before and message is not None and "its transfer_queue, with the prompts and answers" in message
