"""megatron-core 0.16.1 on a CPU over gloo: what stands in its way there, and tiny models that run.

Nothing here touches routing: the routers, dispatchers, experts and checkpoint functions under test are megatron-core's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCABULARY = 64
EXPERTS, TOP_K = 8, 2


class _Stream:
    """A CUDA stream that has nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, *args: Any) -> _Stream:
        return self


def _shim() -> None:
    cuda: Any = torch.cuda
    # Megatron makes buffers on, and moves router weights to, `torch.cuda.current_device()`, which asserts without CUDA.
    cuda.current_device = lambda: torch.device("cpu")
    # Its random-number tracker and its checkpoint save and restore the CUDA generator's state; here the CPU's does the work.
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    import megatron.core.tensor_parallel.random as tracker

    tracker._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tracker._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # The all-to-all dispatcher copies sizes to the host on a stream of its own.
    stream = _Stream()
    cuda.Stream = _Stream
    cuda.current_stream = lambda *args, **kwargs: stream
    cuda.stream = lambda *args: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    # A bug of 0.16.1 without transformer-engine: the name is only bound when its import succeeds (mended in 0.17.0).
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # The dispatcher turns the split sizes of an all-to-all into host integers only when they are CUDA tensors.
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    move = dispatcher.maybe_move_tensor_to_cpu

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else move(tensor, as_numpy, record_stream)

    dispatcher.maybe_move_tensor_to_cpu = to_host
    # The pipeline communicator waits for the device after its sends.
    cuda.synchronize = lambda *args: None
    # The torch norm refuses sequence parallelism, because its weights' gradients are not summed over the ranks then; these
    # tests compare the gradients of one rank with those of the same rank.
    import megatron.core.transformer.torch_norm as torch_norm

    def norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> nn.Module:
        return nn.RMSNorm(hidden_size, eps=eps)

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(norm)


class NamedCuda(TorchFunctionMode):
    """Makes on the CPU what is made on "cuda" by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def start() -> None:
    """Join the process group at MASTER_ADDR:MASTER_PORT, as one rank that shares nothing."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    torch.set_num_threads(1)
    _shim()
    dist.init_process_group("gloo", rank=0, world_size=1, timeout=timedelta(seconds=60))
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(123)


def configured(**overrides: Any) -> Any:
    """Return a TransformerConfig of a tiny MoE model, float32, without fusions."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": 16,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        **overrides,
    }
    return TransformerConfig(**settings)


def build(**overrides: Any) -> Any:
    """Build a GPTModel with settings of its config."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = configured(**overrides)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", qk_l2_norm=False, vp_stage=None
    )
    torch.manual_seed(0)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Megatron's own spread leaves experts nearly alike, and a wrong route without effect.
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all gradients, and clear them."""
    found = {
        name.replace("_checkpoint_wrapped_module.", ""): p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    model.zero_grad()
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Tell whether two sets of gradients are bitwise equal, and not empty."""
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextlib.contextmanager
def chosen(model: nn.Module) -> Iterator[dict[int, list[Tensor]]]:
    """Collect what routers hand to their dispatchers, `[rows, E]` bool per call, by decoder layer."""
    from megatron.core.transformer.moe.router import TopKRouter

    maps: dict[int, list[Tensor]] = {}
    handles = []
    for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
        calls = maps.setdefault(router.layer_number - 1, [])
        handles.append(router.register_forward_hook(lambda module, args, output, calls=calls: calls.append(output[1])))
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()
