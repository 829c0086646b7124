"""Tell which of a Trainer's checkpoints are whole, because a run may have been killed while it wrote one.

transformers resumes from the folder with the highest step, whatever is in it, and fails on an incomplete one until somebody
deletes it. A Trainer writes `trainer_state.json` last.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mismatch_ext.errors import RecordError

# transformers writes this file into a checkpoint that it saves while the machine is being taken away.
INCOMPLETE = "checkpoint-is-incomplete.txt"


def fault_of(checkpoint: Path) -> str | None:
    """Say why a checkpoint cannot be resumed, or return None if it was finished, as far as its files tell.

    Args:
        checkpoint: The folder.
    """
    if (checkpoint / INCOMPLETE).exists():
        return f"it holds {INCOMPLETE}"
    state = checkpoint / TRAINER_STATE_NAME
    if not state.is_file():
        return f"it has no {TRAINER_STATE_NAME}, which is written last"
    try:
        int(json.loads(state.read_text(encoding="utf-8"))["global_step"])
    except (ValueError, TypeError, KeyError):
        return f"its {TRAINER_STATE_NAME} is cut off"
    for path in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            return f"its {path.name} is cut off"
    # torch.save writes a zip archive, whose directory comes last. Files of other owners are not checked.
    saved = [checkpoint / name for name in (OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME)]
    for path in [*saved, *sorted(checkpoint.glob("rng_state*.pth"))]:
        if path.is_file() and not zipfile.is_zipfile(path):
            return f"its {path.name} is cut off"
    return None


def last_whole(output_dir: str | Path) -> tuple[Path | None, dict[str, str]]:
    """Return the last checkpoint that is whole, and by folder name what is wrong with the later ones.

    Args:
        output_dir: The trainer's output folder.
    """
    faults: dict[str, str] = {}
    for checkpoint in reversed(_checkpoints(Path(output_dir))):
        fault = fault_of(checkpoint)
        if fault is None:
            return checkpoint, faults
        faults[checkpoint.name] = fault
    return None, faults


def resumable(asked: str | Path | bool | None, output_dir: str | Path) -> tuple[str | Path | bool | None, list[str]]:
    """Return what `Trainer.train` has to resume from, and messages about checkpoints that were passed over. Deletes nothing.

    Args:
        asked: What `Trainer.train` was asked to resume from: a path, or True for the last checkpoint in the output folder.
        output_dir: The trainer's output folder.

    Raises:
        RecordError: The named checkpoint, or every checkpoint in the folder, is not whole; says which one is, or what to delete.
    """
    if asked is True:
        whole, faults = last_whole(output_dir)
        if whole is None and faults:
            raise RecordError(
                f"resume_from_checkpoint=True, but no checkpoint in {output_dir} is whole: {_told(faults)}. The run was ended "
                f"while it wrote them. Delete {_folders(faults, output_dir)} and train without resume_from_checkpoint."
            )
        message = (
            f"{_told(faults)}: not whole, as after a run that was ended while it wrote it. Resuming from {whole}, the last "
            f"whole checkpoint before; what is in {_folders(faults, output_dir)} is written over when that step is saved again."
        )
        return (asked if whole is None else str(whole)), [message] if faults else []
    if asked and Path(asked).is_dir() and (fault := fault_of(Path(asked))):
        other = last_whole(Path(asked).parent)[0]
        advice = "Delete it" if other is None else f"Resume from {str(other)!r}, the last one there that is whole"
        raise RecordError(
            f"resume_from_checkpoint={str(asked)!r}: this checkpoint is not whole, {fault}. The run was ended while it wrote it. "
            f"{advice}."
        )
    return asked, []


def _checkpoints(output_dir: Path) -> list[Path]:
    """Return a folder's checkpoints in the order of their steps."""
    if not output_dir.is_dir():
        return []
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    found = [
        (match, path) for path in output_dir.iterdir() if (match := pattern.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found, key=lambda pair: int(pair[0][1]))]


def _told(faults: dict[str, str]) -> str:
    return "; ".join(f"{name}: {fault}" for name, fault in faults.items())


def _folders(faults: dict[str, str], output_dir: str | Path) -> str:
    return " and ".join(str(Path(output_dir) / name) for name in faults)
