"""Why rollouts ended, as their records have it, beside how they ended."""

from __future__ import annotations

from typing import Any


def watch_ends(trainer: Any) -> list[list[Any]]:
    """Note why each rollout ended, by its record, and how: its length, and whether its last token ends a response."""
    ends: list[list[Any]] = []
    check, end = trainer.mm.check_records, trainer.processing_class.eos_token_id

    def noted(output: Any, batch: Any, bad: Any) -> Any:
        ends.extend([one.finish_reason, len(one.response_ids), one.response_ids[-1] == end] for one in batch.records)
        return check(output, batch, bad)

    trainer.mm.check_records = noted
    return ends


def expect_ends(ends: list[list[Any]], longest: int) -> None:
    """Assert that records tell answers that the model has ended from those that were cut at a length, and that both occur."""
    assert {reason for reason, *_ in ends} == {"stop", "length"}, ends
    assert all((reason == "stop") == ended and (ended or length == longest) for reason, length, ended in ends), ends
