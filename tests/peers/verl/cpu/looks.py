"""Notes what each weight update of a run moved and what the check found, where VERL_CPU_LOOKS names a file."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tests.peers.verl.cpu.after_import import AfterImport

LOOKS = "VERL_CPU_LOOKS"
"""Environment variable that names the file, which gets a line from the driver and one from the actor for each update."""


def note(file: Path, **found: Any) -> None:
    """Add a line to the file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(found) + "\n")


def note_verdicts(file: Path) -> None:
    """Let the driver write what it finds of each update."""

    def change(module: Any) -> None:
        judge = module.WeightVerifier.judge

        @functools.wraps(judge)
        def noting(self: Any, sent: Any, look: Any) -> Any:
            verdict = judge(self, sent, look)
            note(
                file,
                kind="verdict",
                status=verdict.status,
                gap=verdict.gap_mean,
                message=verdict.message,
                probes=self.probes.tolist(),
                actor=look.logprobs.tolist(),
            )
            return verdict

        module.WeightVerifier.judge = noting

    AfterImport("mismatch_ext.weights", change)


def note_movement(file: Path) -> None:
    """Let the actor write, each time that it is looked at, how many tensors it has and which are as they were before."""

    def change(module: Any) -> None:
        look = module.MismatchWorker.mismatch_look
        before: dict[str, Any] = {}

        @functools.wraps(look)
        def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
            now = {name: shard.detach().clone() for name, shard in module.named_shards(self.actor.engine.module)}
            same = [name for name, values in now.items() if name in before and values.equal(before[name])]
            note(file, kind="movement", tensors=len(now), same=same)
            before.update(now)
            return look(self, *args, **kwargs)

        module.MismatchWorker.mismatch_look = noting

    AfterImport("mismatch_ext.adapters.verl.worker", change)
