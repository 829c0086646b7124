"""`mismatch-ext` with an engine that gets other prompts: `python -m benchmarks.other_prompts FILE doctor ...`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

from mismatch_ext.adapters import cli
from mismatch_ext.adapters.doctor import command


def main() -> int:
    """Run a command whose engine is asked the prompts of a file, in their order."""
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    seen = [json.loads(line)["prompt_ids"] for line in lines]
    with patch.object(command, "examine", partial(command.examine, seen=seen)):
        return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
