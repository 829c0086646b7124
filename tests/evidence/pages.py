"""What quotes the evidence: docs/evidence.md, and figures of README and docs between their marks."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.evidence.machine import ROOT
from tests.evidence.slices import SLICES, Slice, pick
from tests.turns import commits

Record = dict[str, Any]
README = ROOT / "README.md"
PAGE = ROOT / "docs/evidence.md"
FOLDER = ROOT / "evidence"
LABELS = {"eval/familiar": "trained distribution", "eval/unfamiliar": "unfamiliar and longer"}


def read_records(folder: Path = FOLDER) -> dict[str, Record]:
    """Read the evidence files that tests write, by name; those with a hyphen in it are a benchmark's, and of docs/gpu.md."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.stem.isidentifier()]
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    for name, record in found.items():
        assert record["name"] == name, f"evidence/{name}.json calls itself {record['name']!r}"
    return found


def measured_on(record: Record) -> str:
    """Return where figures were measured, for a sentence: `2 cores of Intel(R) Xeon(R) Processor with amx_bf16, avx512_fp16`."""
    machine = record["machine"]
    # Those that decide by which kernels bf16 and FP16 are multiplied.
    telling = [
        flag
        for flag in ("amx_bf16", "amx_fp16", "avx512_fp16", "avx512_bf16", "avx512f")
        if flag in machine["instruction_sets"]
    ]
    cores = "2 cores" if machine["cores"] == 2 else f"{machine['cores']} cores"
    return f"{cores} of {machine['cpu']}" + (f" with {', '.join(telling[:2])}" if telling else "")


def number(value: float, digits: int = 3) -> str:
    """Return a figure for a reader: `1.15e-3`, `0.73`, `212,352`."""
    if abs(value) >= 100 or (value == int(value) and value):
        return f"{round(value):,}"
    text = f"{value:.{digits}g}"
    return re.sub(r"e-0?", "e-", text) if abs(value) >= 1e-2 else _scientific(value, digits)


def _scientific(value: float, digits: int) -> str:
    return "0" if not value else re.sub(r"e([-+])0?", r"e\1", f"{value:.{digits - 1}e}")


def interval(found: dict[str, float], digits: int = 2) -> str:
    """Return a ratio with its interval: `8.4 (8.2 to 8.6)`."""
    value, low, high = (number(found[key], digits) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def is_interval(value: object) -> bool:
    """Tell whether a figure is an interval."""
    return isinstance(value, dict) and {"value", "low", "high"} <= set(value)


def flat(figures: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield every figure with its path, formatted."""
    if is_interval(figures):
        yield ", ".join(path), interval(figures, 3)
    elif isinstance(figures, dict):
        for key, value in figures.items():
            yield from flat(value, (*path, str(key)))
    elif isinstance(figures, list):
        yield ", ".join(path), ", ".join(number(v) if isinstance(v, (int, float)) else str(v) for v in figures)
    elif isinstance(figures, bool) or not isinstance(figures, (int, float)):
        yield ", ".join(path), str(figures)
    else:
        yield ", ".join(path), number(figures)


def cell(text: str) -> str:
    """Return a text that cannot end a table's cell."""
    return text.replace("|", "\\|")


def evidence_page(records: dict[str, Record]) -> str:
    """Return docs/evidence.md."""
    lines = [
        "# Evidence",
        "",
        "Written by `make evidence` from the files in [evidence/](../evidence), each of which a test of `tests/evidence` wrote",
        "when all that it asserts had held. A fast test holds this page, and what others quote, to those files. Intervals are",
        "of 95 %, by the bootstrap over responses. Seconds say how long the test took on a machine that may have been busy.",
        "A commit may be on no branch after a rebase; the hashes of the trees of code as they were then, where a file has them,",
        "are `git rev-parse COMMIT:adapters` of any commit with the same code.",
    ]
    for name, record in records.items():
        versions = ", ".join(f"{peer} {version}" for peer, version in record["versions"].items())
        commit = record["commit"][:10] + (", with changes" if record["dirty"] else "")
        lines += ["", f"## {name}", "", record["claim"], ""]
        lines += [f"- **Measured**: {record['date']}, {measured_on(record)}; commit {commit}; {record['seconds']} s"]
        lines += [f"- **With**: {versions}"]
        if trees := record.get("trees"):
            lines += [f"- **Code**: {', '.join(f'{path} {tree[:10]}' for path, tree in trees.items())}"]
        lines += [f"- **By**: `{record['command']}`"] if record["command"] else []
        lines += [f"- **Held by**: `{record['test']}`", "", "| figure | |", "|---|---|"]
        lines += [f"| {cell(path)} | {cell(text)} |" for path, text in flat(record["figures"])]
    lines += ["", "## Not recorded yet", "", "A test judges and writes each of these; run its slice to record it.", ""]
    lines += [
        f"- {name}: run `make evidence SLICE={slice_of(name)}`" for name in NOT_YET_RECORDED if name not in records
    ]
    return "\n".join(lines) + "\n"


def written_by() -> dict[str, str]:
    """Return every name that a test of tests/evidence passes to `evidence`, with its file's name as slices have it."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "evidence":
                found[str(ast.literal_eval(node.args[0]))] = path.stem.removeprefix("test_")
    return found


def due() -> tuple[int, str]:
    """Return the slice that is due, and why."""
    records, names = read_records(), written_by()

    def oldest(chosen: Slice) -> str | None:
        wanted = [name for name, file in names.items() if file in chosen.files]
        return min((records[name]["date"] if name in records else "" for name in wanted), default=None)

    return pick([oldest(chosen) for chosen in SLICES], commits())


def slice_of(name: str) -> int:
    """Return the number of the slice that writes an evidence file."""
    return next(number for number, chosen in enumerate(SLICES, start=1) if written_by()[name] in chosen.files)


def demo_part(records: dict[str, Record]) -> str:
    """Return the README's table of the demo."""
    record = records["demo_dense"]
    figures = record["figures"]
    tokens = " and ".join(f"{round(figures['tokens'][split], -3) // 1000:.0f}" for split in LABELS)
    lines = [
        f"What it printed on {measured_on(record)} (CPU kernels; a GPU's gap differs).",
        f"Mean |Δlogp| in nats per token at the same weights, {tokens} thousand tokens, with 95 % intervals of the ratios:",
        "",
        "| prompts | bf16 | FP16 | float32 | bf16 / FP16 | k3 KL, bf16 / FP16 |",
        "|---|---|---|---|---|---|",
    ]
    for split, label in LABELS.items():
        means = [number(figures["mean |Δlogp|"][run][split], 2) for run in ("bf16", "fp16", "fp32")]
        ratios = [interval(figures["bf16 over fp16"][split][measure]) for measure in ("abs", "k3")]
        lines.append(f"| {label} | {' | '.join([*means, *ratios])} |")
    first, last = figures["reward"]["bf16"]
    lines += [
        "",
        f"The reward climbs from {first:.2f} to {last:.2f} in {figures['steps']['bf16']} steps in bf16, as in float32: a run",
        "this short and small shows the gap, not its consequences.",
    ]
    return "\n".join(lines)


def replay_part(records: dict[str, Record]) -> str:
    """Return the table of routing replay."""
    record = records["replay_gap"]
    figures = record["figures"]
    tokens = " and ".join(f"{round(figures[split]['tokens'], -3) // 1000:.0f}" for split in LABELS)
    lines = [
        "trains with R3 and scores the same tokens with and without it (bf16 on both sides, after "
        f"{figures['steps']} steps of GRPO;",
        f"{tokens} thousand tokens; {measured_on(record)}):",
        "",
        "| prompts | routing | mean \\|Δlogp\\| | largest \\|Δlogp\\| | k3 KL | tokens off by a factor of 2 |",
        "|---|---|---|---|---|---|",
    ]
    for split, label in LABELS.items():
        for routing, first in (("the trainer's own", label), ("replayed", "")):
            values = figures[split][routing]
            cells = [number(values[key], 2) for key in ("mean |Δlogp|", "largest |Δlogp|", "k3", "F(2)")]
            lines.append(f"| {first} | {routing} | {' | '.join(cells)} |".replace("|  |", "| |"))
    left = [f"{interval(figures[split]['left by replay']['k3'])} of k3 on the {LABELS[split]}" for split in LABELS]
    left[1] = left[1].replace("the unfamiliar and longer", "unfamiliar and longer prompts")
    lines += ["", f"Replay leaves {left[0]},", f"and {left[1]} (95 % intervals)."]
    if oracle := figures.get("float32"):
        lines += [
            f"In float32, of {oracle['decisions']:,.0f} decisions of engine and trainer, {oracle['that differ']:,.0f} differ."
        ]
    return "\n".join(lines)


def cost_part(records: dict[str, Record]) -> str:
    """Return the sentence on what a step costs."""
    found = records["step_cost"]["figures"]
    return (
        f"A training step with every section on, R3 and monitor included, takes {found['ratio']:.2f} times the processor time\n"
        f"of stock TRL's (`make bench`, last row, on {measured_on(records['step_cost'])})."
    )


PARTS: dict[str, Callable[[dict[str, Record]], str]] = {
    "demo": demo_part,
    "replay_gap": replay_part,
    "cost": cost_part,
}
# The page that quotes each part.
QUOTED_IN = {"demo": README, "replay_gap": ROOT / "docs/routing.md", "cost": ROOT / "docs/trl.md"}


# Evidence that a test writes and whose slice has not been recorded on the present models; where a page would quote it, it says
# so instead.
NOT_YET_RECORDED = (
    "demo_moe_trained",
    "example_dense_fp16",
    "example_moe_r3",
    "lr_gap_quick",
)
MEASURED_BY = {"demo": "demo_dense", "replay_gap": "replay_gap", "cost": "step_cost"}


def unrecorded(name: str) -> str:
    """Return what stands in the place of figures that were not recorded on the present models.

    Raises:
        ValueError: Nobody has said so: a file has been lost.
    """
    if name not in NOT_YET_RECORDED:
        raise ValueError(f"evidence/{name}.json is missing; measure it by `make evidence SLICE={slice_of(name)}`")
    return f"Not recorded yet on the models of this repository: slice {slice_of(name)} of `make evidence` measures it."


def with_parts(page: Path, text: str, records: dict[str, Record]) -> str:
    """Return a page's text with each part that it quotes written anew between its marks.

    Raises:
        ValueError: A mark is missing.
    """
    for name, part in PARTS.items():
        if QUOTED_IN[name] != page:
            continue
        begin, end = f"<!-- begin evidence {name} -->\n", f"<!-- end evidence {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{page.name} has lost a mark of the evidence {name!r}: {begin.strip()} or {end}")
        said = part(records) if MEASURED_BY[name] in records else unrecorded(MEASURED_BY[name])
        text = f"{before}{begin}{said}\n{end}{after}"
    return text


def write_pages() -> None:
    """Write docs/evidence.md and the parts that other pages quote from the evidence files."""
    records = read_records()
    PAGE.write_text(evidence_page(records), encoding="utf-8")
    for page in sorted(set(QUOTED_IN.values())):
        page.write_text(with_parts(page, page.read_text(encoding="utf-8"), records), encoding="utf-8")
