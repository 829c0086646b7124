"""docs/compatibility.md and docs/install.md, of what was recorded: `python -m tests.stacks.page`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.stacks.cells import CELLS, FEATURES, ROOT, Cell
from tests.stacks.pins import pinned

RECORDS = ROOT / "evidence/stacks"
INSTALLS = ROOT / "evidence/installs"
PAGE = ROOT / "docs/compatibility.md"
INSTALL = ROOT / "docs/install.md"
# What was run of each peer, written by hand.
PEERS = Path(__file__).with_name("peers.md")

Record = dict[str, Any]


def read(folder: Path) -> dict[str, Record]:
    """Read a folder's files by stack, in the order of `CELLS`."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    return {name: found[name] for name in CELLS if name in found}


def holds(record: Record | None, cell: Cell) -> str:
    """Return a stack's versions as they ran, or else as they are pinned: `trl 1.16.0, vllm 0.31.0`."""
    pins = pinned(cell.pins().read_text(encoding="utf-8"))
    versions = record["holds"] if record else {name: pins.get(name, pins.get(f"{name}-cpu")) for name in cell.holds}
    return ", ".join(f"{name} {version or 'absent'}" for name, version in versions.items())


def outcome(record: Record, feature: str, cell: Cell) -> str:
    """Return how a feature's tests ended; what failed is set bold."""
    if feature not in cell.tests:
        return "-"
    found = record["features"].get(feature)
    if found is None:
        return f"**{record['trouble'] or 'not run'}**"
    failed = f"**{len(found['failed'])} failed**, " if found["failed"] else ""
    return f"{failed}{found['passed']} passed"


def summary(record: Record | None) -> str:
    """Return how a stack's tests ended in all."""
    if record is None:
        return "**not run**"
    if record["trouble"] or not record["features"]:
        return f"**{record['trouble'] or 'not run'}**"
    failed = sum(len(found["failed"]) for found in record["features"].values())
    passed = sum(found["passed"] for found in record["features"].values())
    return (f"**{failed} failed**, " if failed else "") + f"{passed} passed"


def routes(record: Record | None, cell: Cell) -> str:
    """Return whether the engine's routes are recorded on this CPU."""
    if not {"vllm", "sglang"} & {*cell.holds}:
        return "-"
    return "no" if cell.no_routes else "yes" if record else "not run"


def short_table(records: Mapping[str, Record]) -> str:
    """Return what each stack holds and how it ended, one row per stack."""
    lines = ["| stack | holds | here, on a CPU | routes of the engine, here | on a GPU |", "|---" * 5 + "|"]
    for name, cell in CELLS.items():
        record = records.get(name)
        lines.append(
            f"| {name}: {cell.title} | {holds(record, cell)} | {summary(record)} | {routes(record, cell)} | not run |"
        )
    return "\n".join(lines)


def table(records: Mapping[str, Record]) -> str:
    """Return the page's table: one row per stack, one column per feature."""
    lines = ["| stack | " + " | ".join(FEATURES.values()) + " |", "|---" * (len(FEATURES) + 1) + "|"]
    for name, cell in CELLS.items():
        record = records.get(name)
        ended = [outcome(record, feature, cell) if record else "**not run**" for feature in FEATURES]
        lines.append(f"| {name} | " + " | ".join(ended) + " |")
    return "\n".join(lines)


def section(cell: Cell, record: Record | None, install: Record | None) -> list[str]:
    """Return what the page says of one stack."""
    lines = ["", f"## {cell.name}", "", f"{cell.title[0].upper()}{cell.title[1:]}.", ""]
    given = "".join(f"{line}\\n" for line in cell.overrides)
    lines += [*([f"    printf '{given}' > overrides.txt"] if given else []), "    " + cell.install, ""]
    if install:
        named = ", ".join(f"{name} {version}" for name, version in install["holds"].items())
        resolver = cell.install.partition(" ")[0]
        lines.append(
            f"- **That command installs** {named} "
            f"(as {resolver} resolved it on {install['date']} for Python {install['python']})."
        )
    pins = cell.pins().relative_to(ROOT).as_posix()
    lines.append(
        f"- **{'Ran here' if record else 'Pinned'}**: {holds(record, cell)}; everything else is in [{pins}](../{pins})."
    )
    lines += [f"- **Other than there**: {sentence}" for sentence in cell.differs]
    recorded = cell.no_routes or {"-": "no engine.", "yes": "recorded.", "not run": "not run."}[routes(record, cell)]
    lines.append(f"- **Routes of the engine, on this CPU**: {recorded}")
    if record:
        machine = record["machine"]
        built = record["built"].get("seconds")
        lines.append(
            f"- **Measured**: {record['date']}, {machine['cores']} cores of {machine['cpu']}, {machine['gpu'] or 'no GPU'}; "
            f"commit {record['commit'][:10]}{', changed since' if record['dirty'] else ''}; tests {record['seconds']} s"
            + (f", environment from empty {built} s" if built else "")
        )
        failed = [test for found in record["features"].values() for test in found["failed"]]
        lines += [f"- **Failed**: `{test}`" for test in dict.fromkeys(failed)]
    lines.append("- **On a GPU**: not run.")
    lines += ["- **Tests**:"]
    for feature, tests in cell.tests.items():
        lines.append(f"  - {FEATURES[feature]}: {', '.join(f'`{short(test)}`' for test in tests)}")
    return lines


def short(test: str) -> str:
    """Return a test's name for a reader."""
    return test.removeprefix("tests/").replace(".py", "")


def page(records: Mapping[str, Record], installs: Mapping[str, Record]) -> str:
    """Return docs/compatibility.md."""
    lines = [
        "# Compatibility",
        "",
        "What was run, one row per stack that people have. `make matrix` builds every stack's environment from exact pins,",
        "runs its tests with the real peers and writes this page; `make stack STACK=name` does it for one. Each count is of",
        "tests that passed; what did not pass is set bold. What works in the environment that you have, and why not,",
        "`mismatch-ext compat` says.",
        "",
        short_table(records),
        "",
        "By section, as far as a stack has it:",
        "",
        table(records),
        "",
        "By peer. A newer version is a warning, and a feature is refused, by name, where something that it holds on to has",
        "changed or is known to be wrong there ([seams.md](seams.md)):",
        "",
        PEERS.read_text(encoding="utf-8").rstrip(),
    ]
    for name, cell in CELLS.items():
        lines += section(cell, records.get(name), installs.get(name))
    return "\n".join(lines) + "\n"


INSTALL_HEAD = """\
# Installing beside what you have

    pip install mismatch-ext

needs torch, numpy and packaging, and never replaces the torch or the engine that you have. The extras (`trl`, `verl`, `vllm`,
`sglang`, `megatron`, `report`) carry floors only: what works with the versions that pip then finds is decided when a run starts,
feature by feature, and `mismatch-ext compat` prints it beforehand. A version that no stack below has run is one warning; what is
known to be wrong with one is an error that says what to install.

Below are the commands for stacks that people have, resolved as a user with a GPU types them. The last column says which were run
here, on two CPU cores with the builds that [compatibility.md](compatibility.md) names; none has been run on a GPU.

| you have or want | command | installs | ran here |
|---|---|---|---|
"""
INSTALL_END = """
## verl with its own pins

verl 0.9.1 names exact versions in its extras: `verl[vllm]` torch 2.11.0, vLLM 0.24.0 and transformers 5.9.0, `verl[sglang]` the
same torch and transformers with SGLang 0.5.12. Nothing of them has to be upgraded.

    pip install "mismatch-ext[verl,report]" "verl[vllm]==0.9.1"

vLLM 0.24 records the routes of experts whose router is asked, and returns zeros, without an error, for kernels that choose and
compute in one call: its CPU experts, and by its source the monolithic kernels of a GPU. On a CPU `routing.mode: R3` is refused
before Ray starts. On a GPU the zeros are refused when the first answers arrive, before a step is trained, with a `RoutingError`
that says "has 0 rows for ... tokens, and zeros from there on". In both cases take `mode: R2`, which records in the trainer, or
a vLLM from 0.30 on.

No installer takes `verl[sglang]` by itself: verl asks for transformers 5.9.0, and SGLang 0.5.12 for 5.6.0, which verl excludes.
uv does when it is told which one counts, as verl's own repository tells it. transformers 5.9.0 asks for a `kernels` below 0.13
where there is one, and with 0.17, which SGLang's open requirement resolves to, it fails when it is imported.

    printf 'transformers==5.9.0\\nkernels>=0.12,<0.13\\n' > overrides.txt
    uv pip install --override overrides.txt "mismatch-ext[verl,report]" "verl[sglang]==0.9.1"

## Unsloth

TRL 1.15.0, the newest that Unsloth allows, computes every log-probability by a Triton kernel: without Triton it is refused by
name, and with Triton, which runs on a GPU alone, it has not been run. Unsloth replaces TRL's trainers by its own, so that
only `MismatchCallback` (learning rate, alarms) could reach it; that has not been run either.
"""


def install_page(records: Mapping[str, Record], installs: Mapping[str, Record]) -> str:
    """Return docs/install.md."""
    rows = []
    for name, cell in CELLS.items():
        resolved = installs.get(name)
        found = (
            ", ".join(f"{one} {version}" for one, version in resolved["holds"].items()) if resolved else "not resolved"
        )
        ran = f"{summary(records.get(name))} ([{name}](compatibility.md#{anchor(name)}))"
        rows.append(f"| {cell.title} | `{cell.install}` | {found} | {ran} |")
    return INSTALL_HEAD + "\n".join(rows) + "\n" + INSTALL_END


def anchor(name: str) -> str:
    """Return a heading's anchor."""
    return re.sub(r"[^a-z0-9-]", "", name.lower())


def write(records: Mapping[str, Record], installs: Mapping[str, Record]) -> None:
    """Write the pages."""
    PAGE.write_text(page(records, installs), encoding="utf-8")
    INSTALL.write_text(install_page(records, installs), encoding="utf-8")


def main() -> None:
    """Write the pages from the records."""
    write(read(RECORDS), read(INSTALLS))


if __name__ == "__main__":
    main()
