"""Which of verl's checkpoints are whole: a run may have been killed while it wrote one, or the file that names the last.

verl resumes the checkpoint that `latest_checkpointed_iteration.txt` names. That file is written last: after `data.pt` and, in
asynchronous modes, after `transfer_queue`, which gets its name when it is finished. A kill can leave the file empty. With
`max_actor_ckpt_to_keep`, the actor's part of the previous checkpoint is deleted before that file is written.
"""

from __future__ import annotations

import re
import zipfile
from collections import defaultdict
from pathlib import Path

from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

from mismatch_ext.errors import RecordError

SHARD = re.compile(r"(.+)_world_size_(\d+)_rank_(\d+)\.pt")


def fault_of(checkpoint: Path) -> str | None:
    """Say why a checkpoint cannot be resumed, or return None if it is whole, as far as its files tell.

    Args:
        checkpoint: The folder `global_step_N`, with the files of all ranks.
    """
    if not checkpoint.is_dir():
        return "it is not there"
    if not (checkpoint / "data.pt").is_file():
        return "it has no data.pt, which is written last"
    if not any(path.is_file() for path in (checkpoint / "actor").rglob("*")):
        return "its folder actor has no files"
    queue = checkpoint / "transfer_queue"
    if queue.with_suffix(".tmp").is_dir() and not queue.is_dir():
        return "its transfer_queue, with the prompts and answers in flight, is cut off"
    ranks: dict[tuple[str, int], set[int]] = defaultdict(set)
    for path in sorted(checkpoint.rglob("*.pt")):
        match = SHARD.fullmatch(path.name)
        # torch.save writes a zip archive, whose directory comes last. Files of other names are not looked into.
        if (match or path.name == "data.pt") and not zipfile.is_zipfile(path):
            return f"its {path.relative_to(checkpoint)} is cut off"
        if match:
            ranks[f"{path.parent.name}/{match[1]}", int(match[2])].add(int(match[3]))
    for (name, world), found in ranks.items():
        if missing := sorted(set(range(world)) - found):
            return f"its {name} lacks rank {missing[0]} of {world}"
    return None


def resumable(folder: Path) -> tuple[Path | None, str | None]:
    """Return the checkpoint to resume instead of verl's choice, and what to say about it; both None leave the choice to verl.

    Args:
        folder: verl's `trainer.default_local_dir`.

    Raises:
        RecordError: Neither the last checkpoint nor another one is whole; says what to delete.
    """
    tracker = Path(get_checkpoint_tracker_filename(str(folder)))
    if not tracker.exists():
        return None, None  # nothing has been saved, and verl begins anew
    text = tracker.read_text(errors="replace").strip()
    named = folder / f"global_step_{text}"
    what = f"{tracker} holds {text!r}, which is no step"
    if text.isdecimal():
        if (fault := fault_of(named)) is None:
            return None, None
        what = f"{named}, which {tracker.name} names, is not whole: {fault}"
    steps = {
        int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(r"global_step_(\d+)", path.name))
    }
    for step in sorted(steps, reverse=True):
        if fault_of(steps[step]) is None:
            return steps[step], f"{what}. Resuming from {steps[step]}, the last checkpoint that is; nothing is deleted."
    if not steps:
        return None, None  # somebody has removed them, and verl begins anew
    raise RecordError(
        f"{what}, as after a run that was ended while it wrote it, and no other checkpoint in {folder} is whole. To begin anew, "
        f"delete {tracker} and {', '.join(sorted(path.name for path in steps.values()))} beside it; or give a checkpoint "
        "elsewhere as trainer.resume_from_path, with trainer.resume_mode=resume_path."
    )
