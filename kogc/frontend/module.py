"""A live PyTorch module that follows the trace contract."""

from __future__ import annotations

import hashlib
import uuid

import torch
from torch import nn

from kogc.frontend.errors import FrontendError
from kogc.frontend.import_fx import to_numpy
from kogc.frontend.model_input import ModelInput
from kogc.frontend.sources import CheckedWeights, TorchWeights, stored_dtype
from kogc.frontend.trace import trace
from kogc.ir.serialize import graph_to_json

#: Modules up to this size are recognised by their contents, larger ones are new each time.
_HASHED_BYTES = 64 << 20


def load_module(
    module: nn.Module, *, name: str | None = None, identity: str | None = None, max_context: int | None = None
) -> ModelInput:
    """A module with its own parameters as weights; nothing is copied.

    ``max_context`` may be less than the module's caches hold, not more: they are the module's own. How many positions that
    is can be told only from how the traced module writes them.

    Raises:
        FrontendError: a parameter type that cannot be packed, or a context below 1.
    """
    name = name or type(module).__name__
    tensors = dict(module.named_parameters())
    if max_context is not None and max_context < 1:
        raise FrontendError(f"{name}: a context of {max_context} was asked for, it must be at least 1")
    dtype = stored_dtype((tensor.dtype for tensor in tensors.values()), name) if tensors else "fp32"
    return ModelInput(
        name=name,
        module=module,
        weights=CheckedWeights(TorchWeights(tensors, name), {n: tuple(t.shape) for n, t in tensors.items()}, name),
        config={},
        tokenizer_json=None,
        chat_template=None,
        eos_ids=(),
        bos_id=None,
        context=max_context,
        identity=_identity(module, identity),
        dtype=dtype,
    )


def _identity(module: nn.Module, weights: str | None) -> str:
    """Changes with the weights (``weights`` stands for them when their file is known) and with what the module computes.

    What it computes is told from its trace: its code and its Python attributes (an eps, a window) show nowhere else.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if any(t.is_meta for t in tensors.values()) or sum(t.nbytes for t in tensors.values()) > _HASHED_BYTES:
        return uuid.uuid4().hex
    graph = trace(module)
    state = hashlib.blake2b(f"{torch.__version__}\0{weights}\0{graph_to_json(graph)}".encode(), digest_size=16)
    for key, table in sorted(graph.tables.items()):
        state.update(key.encode() + table.tobytes())
    if weights is not None:
        return state.hexdigest()
    for key, tensor in sorted(tensors.items()):
        state.update(f"{key}\0{tensor.dtype}\0{tuple(tensor.shape)}".encode())
        state.update(to_numpy(tensor).tobytes())
    return state.hexdigest()
