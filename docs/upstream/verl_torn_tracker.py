"""A kill while verl writes `latest_checkpointed_iteration.txt` leaves it empty: a resumed run ends with a ValueError."""

import tempfile
from pathlib import Path

import torch
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

PEER = "verl"
REPORTED = "not reported"
WORKAROUND = "`resumable` (adapters/verl/driver/whole.py) resumes the last whole checkpoint, and names what was torn"
EXPECTED = "global_step_1"


def seen(latest=find_latest_ckpt_path) -> str:
    """Return the checkpoint that is resumed, where step 1 was saved whole."""
    with tempfile.TemporaryDirectory() as folder:
        actor = Path(folder) / "global_step_1" / "actor"
        actor.mkdir(parents=True)
        torch.save({}, actor.parent / "data.pt")
        torch.save({}, actor / "model_world_size_1_rank_0.pt")
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text("")
        try:
            return Path(latest(folder)).name
        except ValueError as error:
            return f"ValueError: {error}"


def with_workaround() -> str:
    """Ask as this package does."""
    from mismatch_ext.adapters.verl.driver.whole import resumable

    return seen(lambda folder: resumable(Path(folder))[0])


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
