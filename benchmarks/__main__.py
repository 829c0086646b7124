"""Run benchmarks and print one JSON object per line: `python -m benchmarks` runs all timings, `python -m benchmarks kl_full` one.

`quick`, `bias` and `report` take seconds, and the first two have figures of pages. `false_alarms` replays the rules that warn or
end a run over clean logs. `--record FILE` also writes what was printed with machine, versions, date and commit, beside what other
commands recorded there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from tqdm import tqdm

from benchmarks.harness import measured_on

NAMES = ("precision", "kl_full", "routing", "scale", "verl_scale", "trl_server", "trl_step")
ASKED = ("trl_real", "quick", "bias", "centering", "report", "alarms", "false_alarms")
"""These run only if they are named."""


def main() -> None:
    """Run what was named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[*NAMES, *ASKED, []], metavar="NAME", help=", ".join((*NAMES, *ASKED))
    )
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    names, rows = given.names or NAMES, []
    # The progress bar goes to standard error, so that standard output holds only JSON lines.
    for name in tqdm(names, desc="benchmarks", file=sys.stderr):
        for row in importlib.import_module(f"benchmarks.bench_{name}").run():
            print(json.dumps(row), flush=True)
            rows.append(row)
    if given.record:
        command = " ".join(("python -m benchmarks", *given.names))
        records = json.loads(given.record.read_text(encoding="utf-8")) if given.record.exists() else []
        kept = [record for record in records if record["command"] != command]
        kept.append({"command": command, **measured_on(), "figures": rows})
        given.record.write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
