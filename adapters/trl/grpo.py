"""TRL's own GRPO script with the `mismatch` block: `mismatch-ext trl grpo --config file.yaml`, for a file that `trl grpo` takes.

On several processes: `accelerate launch -m mismatch_ext.adapters.trl.grpo --config file.yaml`.
"""

from __future__ import annotations

from collections.abc import Sequence

import trl
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from trl.scripts import grpo


def main(arguments: Sequence[str] | None = None) -> None:
    """Run TRL's script; it imports the two classes by these names when it parses and when it trains."""
    vars(trl).update(GRPOConfig=MismatchGRPOConfig, GRPOTrainer=MismatchGRPOTrainer)
    parser = grpo.make_parser(prog="mismatch-ext trl grpo")
    words = None if arguments is None else list(arguments)
    grpo.main(*parser.parse_args_and_config(words, fail_with_unknown_args=True))


if __name__ == "__main__":
    main()
