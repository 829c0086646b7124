"""docs/stability.md's table and figure, from what is recorded."""

from __future__ import annotations

import statistics

from benchmarks.gpu.svg import Figure, Panel, Series, svg
from benchmarks.stability import async_arms
from benchmarks.stability.arms import ARMS, CONTROLS, EXPERTS
from benchmarks.stability.record import RECORDED, RECORDED_ASYNC, RECORDED_REAL, ROOT, Runs, recorded
from benchmarks.stability.table import difference, first, largest, table

PAGE, DRAWN = ROOT / "docs/stability.md", ROOT / "docs/stability.svg"
BEGIN, END = "<!-- table: python -m benchmarks.stability --page -->", "<!-- end of table -->"
SHOWN = ("no mismatch", "matched", "bypass", "dithered", "tis", "off the grid")


def write_page() -> None:
    """Write the table between its marks, and the figure."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    DRAWN.write_text(svg(figure(recorded()[1])), encoding="utf-8")


def page(text: str) -> str:
    """Return the page with the table of what is recorded."""
    parts = []
    for file, cores, shown in (
        (RECORDED_REAL, "a core a run", table),
        (RECORDED, "a core a run", table),
        (RECORDED_ASYNC, "trainer and server on two cores", async_arms.table),
    ):
        on, runs = recorded(file)
        versions = ", ".join(f"{name} {version}" for name, version in on["versions"].items())
        said = f"Measured {on['date']} on {on['cpu']}, {cores}, with {versions}; commit {on['commit']}."
        parts.append(f"{said}\n\n{shown(runs)}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n".join(parts)
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def figure(runs: Runs) -> Figure:
    """Draw learning over steps, and what of the first steps tells how late an arm learns."""
    steps = max(len(c["length"]) for name in SHOWN for c in runs[name].values())
    lengths = []
    for name in SHOWN:
        curves = [c["length"] + [c["length"][-1]] * (steps - len(c["length"])) for c in runs[name].values()]
        mean = [statistics.fmean(step) for step in zip(*curves, strict=True)]
        lengths.append(Series(name=name, x=list(range(steps)), y=mean, line=True))
    compared = [name for name in (*ARMS, *EXPERTS) if name in runs and name in CONTROLS]
    delays = {name: found[0] for name in compared if (found := difference(runs, name)) is not None}
    late = [name for name in delays if delays[name] > 5]
    others = [name for name in delays if name not in late]

    def points(measure: str) -> list[Series]:
        take = largest if measure == "k3" else first
        return [
            Series(name=title, x=[take(runs[name], measure) for name in names], y=[delays[name] for name in names])
            for title, names in (
                ("arms that learn later than their control, by more than 5 steps", late),
                ("all others", others),
            )
        ]

    return Figure(
        panels=[
            Panel(title="learning", x_title="step", y_title="mean length of responses", series=lengths),
            Panel(
                title="the gap's size does not tell",
                x_title="largest k3",
                y_title="steps to half, less the control's",
                series=points("k3"),
                log_x=True,
            ),
            Panel(
                title="what a clip stops with no policy change does, per token",
                x_title="share of tokens, first 20 steps",
                y_title="steps to half, less the control's",
                series=points("stopped"),
            ),
        ],
        caption="miniatures of Qwen3 in transformers, reward minus the length, one update per rollout; means over seeds",
    )
