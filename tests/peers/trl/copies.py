"""Copies of an installed package, changed as a release would change it; and the changes to TRL."""

from __future__ import annotations

import ast
import importlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

TRAINER, RLOO = "trl/trainer/grpo_trainer.py", "trl/trainer/rloo_trainer.py"
ENGINE, CLIENT = "trl/generation/vllm_generation.py", "trl/generation/vllm_client.py"
OF_A_TRAINER = (
    "_generate_and_score_completions", "_generate", "_generate_single_turn", "_calculate_rewards", "_prepare_inputs",
    "_get_per_token_logps_and_entropies", "compute_loss", "_compute_loss", "training_step", "log", "_save_checkpoint",
)  # fmt: skip
TOUCHED = {
    TRAINER: OF_A_TRAINER,
    RLOO: OF_A_TRAINER,
    ENGINE: ("sync_weights", "generate", "_iter_named_params", "_init_vllm"),
    CLIENT: ("_get", "_post", "init_communicator", "update_named_params", "_start_weight_update", "generate"),
    "trl/trainer/utils.py": ("add_fused_lm_head", "_fused_forward", "use_adapter"),
    "trl/kernels/chunked_logprob.py": ("forward",),
}
"""Functions of TRL that we override, wrap, replace or call, by file."""
IN_OUR_HANDS = {CLIENT: ("_finish_weight_update", "reset_prefix_cache")}
"""Those that ours replace without calling TRL's, so that nothing can be passed on."""

Change = Callable[[Path], None]


def replaced(file: str, *pairs: tuple[str, str]) -> Change:
    """Return a change that replaces text in a file."""

    def change(root: Path) -> None:
        text = (root / file).read_text(encoding="utf-8")
        for old, new in pairs:
            assert old in text, f"{file} has no {old!r}"
            text = text.replace(old, new)
        (root / file).write_text(text, encoding="utf-8")

    return change


def together(*changes: Change) -> Change:
    """Return a change that makes several, in their order."""

    def change(root: Path) -> None:
        for one in changes:
            one(root)

    return change


def _methods(text: str, names: tuple[str, ...]) -> Iterator[ast.FunctionDef]:
    """Yield the functions of these names, the last one of the file first, so that edits leave the others where they are."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name in names]
    yield from sorted(found, key=lambda node: -node.lineno)


def documented(touched: Mapping[str, tuple[str, ...]]) -> Change:
    """Return a change that gives each function, by file, a new docstring and a comment."""

    def change(root: Path) -> None:
        for file, names in touched.items():
            text = (root / file).read_text(encoding="utf-8")
            for node in _methods(text, names):
                lines, first = text.splitlines(keepends=True), node.body[0]
                space = " " * first.col_offset
                if ast.get_docstring(node) is not None:
                    del lines[first.lineno - 1 : first.end_lineno]
                added = f'{space}"""Do what it did before."""\n{space}# A comment of a later release.\n'
                lines.insert(first.lineno - 1, added)
                text = "".join(lines)
            (root / file).write_text(text, encoding="utf-8")

    return change


def with_argument(touched: Mapping[str, tuple[str, ...]]) -> Change:
    """Return a change that gives each function, by file, one more keyword argument, which these files' calls pass."""
    every = {name for names in touched.values() for name in names}

    def change(root: Path) -> None:
        for file, names in touched.items():
            text = (root / file).read_text(encoding="utf-8")
            lines, added = [line.encode() for line in text.splitlines(keepends=True)], []  # ast counts bytes
            for node in _methods(text, names):
                added.append((*_end(*node.args.args, *node.args.defaults), ", of_a_later_release=None"))
            for call in ast.walk(ast.parse(text)):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in every:
                    if ast.unparse(call.func.value) not in ("self", "self.vllm_generation", "self.vllm_client"):
                        continue  # its parent's, or another object's
                    given = (*call.args, *(keyword.value for keyword in call.keywords))
                    line, at = _end(*given) if given else _end(call)
                    added.append((line, at if given else at - 1, ", " * bool(given) + "of_a_later_release=True"))
            for line, at, argument in sorted(added, reverse=True):
                lines[line] = lines[line][:at] + argument.encode() + lines[line][at:]
            (root / file).write_bytes(b"".join(lines))

    return change


def _end(*nodes: ast.expr | ast.arg) -> tuple[int, int]:
    """Return the line and the byte after the last of some nodes, counted from 0."""
    return max((int(node.end_lineno or 0) - 1, int(node.end_col_offset or 0)) for node in nodes)


CLIP = "            coef_2 = torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)\n"
HEAD = "    def _compute_loss(self, model, inputs):\n"
HELPER = (
    "    def _clipped(self, ratio):\n        return torch.clamp(ratio, 1 - self.epsilon_low, 1 + self.epsilon_high)\n\n"
)
OUTPUT = '            "num_items_in_batch": num_items_in_batch,\n'

HARMLESS: dict[str, Change] = {
    "docstrings and comments": documented({**TOUCHED, CLIENT: (*TOUCHED[CLIENT], *IN_OUR_HANDS[CLIENT])}),
    "a keyword argument in each method": with_argument(TOUCHED),
    "a helper out of the loss": replaced(
        TRAINER, (CLIP, "            coef_2 = self._clipped(coef_1)\n"), (HEAD, HELPER + HEAD)
    ),
}
"""By name, what changes nothing that we depend on."""

NEW_RATIO = (
    '        if inputs.get("top_p_ratio") is not None:\n'
    '            per_token_loss = per_token_loss * inputs["top_p_ratio"]\n\n'
)
KL_ADDED = "        if self.beta != 0.0:\n            per_token_loss = per_token_loss + self.beta * per_token_kl\n"
IN_A_BATCH = OUTPUT + '            "top_p_ratio": torch.full_like(completion_mask, 0.9, dtype=torch.float32),\n'
AN_INPUT_OF_EACH_BATCH = replaced(TRAINER, (KL_ADDED, NEW_RATIO + KL_ADDED), (OUTPUT, IN_A_BATCH))
"""What a later release may read beside."""


def copied(root: Path, change: Change, name: str = "trl", version: str = "1.18.2") -> Path:
    """Return a folder with an installed package under another version, changed."""
    package = Path(importlib.import_module(name).__file__ or "").parent
    shutil.copytree(package, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    info = root / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    change(root)
    return root
