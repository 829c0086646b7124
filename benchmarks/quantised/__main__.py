"""The gap of a quantised engine by format: `python -m benchmarks.quantised`."""

from __future__ import annotations

import argparse
import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from typing import Any

from tqdm import tqdm

from benchmarks.quantised.formats import FORMATS
from benchmarks.quantised.measure import RESPONSES, SHARES, measured

COLUMNS = ("mean |Δlogp|", "k3", "F(1.1)", "divergence")


def rows(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table as Markdown, and what does not run below it."""
    lines = [
        "| format | "
        + " | ".join(COLUMNS).replace("|Δlogp|", "\\|Δlogp\\|")
        + " | largest | share by cause | bound advised | sample size | bias removed |",
        "|" + "---|" * 10,
    ]
    for name, one in found.items():
        if "refused" in one:
            continue
        parts = [f"{part} {_interval(share, '.0%')}" for part, share in one.get(SHARES, {}).items()]
        after = one["corrected"]
        cells = [name, *(_interval(one[column], ".2g") for column in COLUMNS), f"{one['largest |Δlogp|']:.2g}"]
        cells += ["; ".join(parts), f"{after['upper bound']:.3g}", f"{after['effective sample size']:.4f}"]
        lines.append("| " + " | ".join([*cells, _interval(after["bias removed"], ".0%")]) + " |")
    refused = [f"- {name}: {one['refused']}" for name, one in found.items() if "refused" in one]
    return [*lines, "", "Not run here:" if refused else "", *refused]


def _interval(found: dict[str, Any], digits: str) -> str:
    return f"{found['value']:{digits}} ({found['low']:{digits}} to {found['high']:{digits}})"


def main() -> None:
    """Measure every format and print the table; `--json` prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantised", description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print a line of figures for each format in the place of the table"
    )
    parser.add_argument("--engine", choices=FORMATS, default="vllm", help="whose formats; it runs in this process")
    parser.add_argument(
        "--formats", nargs="+", metavar="FORMAT", help="some of its formats, each by the beginning of its name"
    )
    parser.add_argument("--responses", type=int, default=RESPONSES, help="responses sampled of each")
    options = parser.parse_args()
    names = [name for name in FORMATS[options.engine] if name.startswith(tuple(options.formats or ("",)))]
    found = {}
    for name in tqdm(names, file=sys.stderr):
        found[name] = measured(options.engine, FORMATS[options.engine][name], options.responses)
        if options.json:
            print(json.dumps({name: found[name]}, ensure_ascii=False), flush=True)
    if not options.json:
        print("\n".join(rows(found)))


if __name__ == "__main__":  # SGLang's scheduler imports this module anew
    main()
