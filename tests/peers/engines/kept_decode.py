"""A planted fault: an engine that prefills with the present weights, and decodes with those of its last norm that it once had.

So does an engine whose captured graphs or packed copies are not renewed. vLLM takes `Keeping` as its worker's extension.
"""

from __future__ import annotations

from typing import Any


def keep_decode(decoder: Any) -> Any:
    """Let steps that decode use the last norm's present weight from here on, whatever it is updated to.

    Args:
        decoder: vLLM's, the part of the model that ends with `norm`.

    Returns:
        What takes the fault away again, by its `remove`.
    """
    from vllm.forward_context import get_forward_context

    kept = decoder.norm.weight.detach().clone()

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        metadata = get_forward_context().attn_metadata
        longest = max((layer.max_query_len for layer in metadata.values()), default=2) if metadata else 2
        if longest > 1:
            return None
        normed, *rest = output if isinstance(output, tuple) else (output,)
        old = (normed * (kept / module.weight)).to(normed.dtype)
        return (old, *rest) if isinstance(output, tuple) else old

    return decoder.norm.register_forward_hook(hook)


class Keeping:
    """What a worker of vLLM's can be asked for, over `/collective_rpc` too."""

    model_runner: Any

    def keep_decode(self) -> str:
        """Plant the fault."""
        self.model_runner.kept_decode = keep_decode(self.model_runner.model.model)
        return "planted"

    def mend_decode(self) -> str:
        """Take the fault away again."""
        self.model_runner.kept_decode.remove()
        return "mended"
