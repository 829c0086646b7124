"""A planted fault as a file: what is broken, which tests must notice, and the patch.

Replay ignores its mask: padding is routed by filler experts.

Noticed-by: tests/peers/transformers/test_contexts.py::test_rows_outside_the_mask_are_routed_by_the_model_and_counted

--- a/adapters/transformers/routing/replay.py
+++ b/adapters/transformers/routing/replay.py
@@ ...
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
PRODUCT = ("mismatch_ext", "adapters", "patches")


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Args:
        path: Its file.
        title: What is broken, in a sentence.
        tests: Files or node ids of tests that must notice.
        files: Product files that the patch changes, relative to the repository.
    """

    path: Path
    title: str
    tests: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem

    @classmethod
    def read(cls, path: Path) -> Fault:
        """Read a file.

        Raises:
            ValueError: It has no sentence, no tests or no patch.
        """
        head, separator, patch = path.read_text(encoding="utf-8").partition("\n--- a/")
        title = " ".join(head.partition("Noticed-by:")[0].split())
        tests = tuple(re.findall(r"^Noticed-by: (\S+)$", head, flags=re.M))
        files = tuple(re.findall(r"^\+\+\+ b/(\S+)$", separator + patch, flags=re.M))
        if not (title and tests and files):
            raise ValueError(
                f"{path}: needs a sentence, a line `Noticed-by: TEST` for each test that must notice, and a patch."
            )
        return cls(path=path, title=title, tests=tests, files=files)

    def apply(self, tree: Path, *, reverse: bool = False) -> None:
        """Plant the fault in a copy of the repository, or take it out again.

        Raises:
            RuntimeError: The patch does not apply: the code it breaks has changed, so it has to be written anew.
        """
        command = ["git", "apply", "--unsafe-paths", "--directory", ".", *(["--reverse"] if reverse else []), self.path]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{self.name} does not apply: {done.stderr.strip()}")


def faults(names: list[str] | None = None) -> list[Fault]:
    """Return the planted faults in the order of their names.

    Args:
        names: Parts of names; None returns all.

    Raises:
        ValueError: A name fits none.
    """
    found = [Fault.read(path) for path in sorted(FOLDER.glob("*.patch"))]
    for name in names or ():
        if not any(name in fault.name for fault in found):
            raise ValueError(f"no planted fault is called {name!r}; there are {', '.join(f.name for f in found)}")
    return [fault for fault in found if not names or any(name in fault.name for name in names)]
