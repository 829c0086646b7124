"""After a kill in the middle of a save, `resume_from_checkpoint=True` takes the torn folder, not the last whole one."""

import shutil
import tempfile
from pathlib import Path

from transformers.trainer_utils import get_last_checkpoint

PEER = "transformers"
REPORTED = "not reported"
WORKAROUND = "none of ours: delete folders without a `trainer_state.json`, which is written last"
EXPECTED = "checkpoint-10"


def seen(last=get_last_checkpoint) -> str:
    """Return the folder that is resumed from: step 10 was saved, step 20 broke off after its weights."""
    with tempfile.TemporaryDirectory() as folder:
        for step in (10, 20):
            (checkpoint := Path(folder) / f"checkpoint-{step}").mkdir()
            (checkpoint / "model.safetensors").touch()
        (Path(folder) / "checkpoint-10" / "trainer_state.json").write_text('{"global_step": 10}')
        return Path(last(folder)).name


def with_workaround() -> str:
    """Delete what was not finished."""

    def last(folder: str) -> str:
        for checkpoint in Path(folder).glob("checkpoint-*"):
            if not (checkpoint / "trainer_state.json").exists():
                shutil.rmtree(checkpoint)
        return get_last_checkpoint(folder)

    return seen(last)


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
