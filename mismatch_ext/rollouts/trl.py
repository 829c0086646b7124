"""TRL's `log_completions`: one parquet file per step, with texts but no token ids.

`GRPOTrainer.log` of `trl/trainer/grpo_trainer.py` (1.16.0) writes the columns `step`, `prompt`, `completion`,
`advantage`, one for each reward, and those that a reward function gives to `log_extra`. AsyncGRPO prints completions
but writes none.
"""

from __future__ import annotations

from typing import NoReturn

from mismatch_ext.errors import RecordError

HOST = "TRL"
MAGIC = b"PAR1"
KEYS = {"step", "prompt", "completion", "advantage"}


def refuse(path: str) -> NoReturn:
    """Say which host wrote a parquet file, and what it lacks.

    Raises:
        RecordError: Always.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        whose = "is parquet, as TRL logs completions (pyarrow, which would tell more, is not installed)"
    else:
        try:
            names = parquet.read_schema(path).names
        except (ArrowException, OSError) as error:
            raise RecordError(f"{path} is damaged parquet: {' '.join(str(error).split())[:200]}") from error
        if not KEYS <= set(names):
            raise RecordError(
                f"{path} is parquet with the columns {', '.join(names)}, which no host that is known here writes; see "
                "docs/doctor.md for what can be read."
            )
        whose = "is of TRL's log_completions"
    raise RecordError(
        f"{path} {whose}, which holds texts alone; the doctor needs token ids and the engine's log-probabilities: write records "
        "with mismatch_ext.rollouts.write_rollouts."
    )
