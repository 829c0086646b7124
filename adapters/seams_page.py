"""Write docs/seams.md: `python docs/generate.py`."""

from __future__ import annotations

from mismatch_ext.adapters.compat import declared

from mismatch_ext.compat import Seam
from mismatch_ext.versions import KNOWN_WRONG, PEERS

HEAD = """# Compatibility by feature

Printed by `python docs/generate.py` from `seams.py` of each adapter and `mismatch_ext/versions.py`.

A version number says little about whether something works: vLLM is released every two weeks, and what this package holds on to in
it is a few dozen symbols. Each of these is declared as a *seam*: what is held on to, what it is used for, which sections of the
block need it, and a probe. `mismatch-ext compat` (or `python -m mismatch_ext compat`, both with `--json`) probes all seams of the
installed peers in about a second and prints which features work, in which host, and why others do not. It reads sources, and
imports and starts nothing.

At the start of a run, before the model is loaded and the engine is built, the seams that the block needs are probed: by TRL's
trainer, by verl's driver, and again in verl's workers.

- **A seam that is gone or has changed** refuses the sections that need it, by name, with what was found and what to do. A block
  without these sections trains.
- **A version that was not run** is one `UntestedVersionWarning`, "untested with vllm 0.33.0; the 14 seams in use hold". To refuse
  it, make the warning an error. What the probes cannot see is proven while the run goes on: dtypes are read back, weights are
  probed after each update, routes are checked as they come in, and each forward pass proves its routers. With
  `monitor.weight_sync: off` that proof is missing, and an engine's version that was not run is refused.
- **A version below the floor** is refused.
- **What is known to be wrong** is an entry with its reason and its condition (below), and refuses what it names where the
  condition is given.
- **A patch** has its own check when it is put on: of the source's digest, or of what the symbol is (a generator, a class of
  autograd's, called by upstream). A symbol that upstream has left behind as a shim is refused: a patch on it would do nothing.

How open the gate is follows from what protects a run. torch, transformers, accelerate and vLLM are open above a floor. TRL is
open for measuring, precision and learning rate; `kl`, `correction` and `routing` need the methods that they stand on to be, line
by line, those of a version that was run, since no check at run time would see a changed loss. SGLang, verl and megatron-core are
taken in the versions that were run.

Floors are not pins: the extras of this package ask for nothing that would replace a torch or an engine that is installed. Which
whole stacks were run is in [compatibility.md](compatibility.md).
"""


def page() -> str:
    """Return the page as Markdown."""
    lines = [HEAD, "## Peers", "", "| peer | accepted | run |", "|---|---|---|"]
    lines += [f"| {peer.name} | `{peer.supports}` | {', '.join(peer.ran)} |" for peer in PEERS.values()]
    lines += ["", "## Known to be wrong", "", "| peer | versions | what | where | why |", "|---|---|---|---|---|"]
    for wrong in KNOWN_WRONG:
        cells = (wrong.peer, f"`{wrong.versions}`", wrong.feature or "all", wrong.condition)
        lines.append(f"| {' | '.join(cells)} | {wrong.reason} Fix: {wrong.remedy}. |")
    lines += ["", "# Seams"]
    for peer in PEERS:
        for seam in declared():
            if seam.peer == peer:
                lines += _section(seam)
    return "\n".join(lines)


def _section(seam: Seam) -> list[str]:
    needed = "every block" if "monitor" in seam.features else ", ".join(f"`{feature}`" for feature in seam.features)
    where = f"; used with {', '.join(seam.where)}" if seam.where else ""
    return [
        "",
        f"### {seam.name}",
        "",
        f"- **For**: {seam.what}",
        f"- **Needed by**: {needed}{where}",
        *(f"- **Holds on to**: {claim}" for claim in seam.claims),
        f"- **Upstream**: {seam.upstream}",
    ]
