"""A model of Hugging Face Transformers without values for its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kogc.frontend.errors import FrontendError, first_line
from kogc.frontend.quiet import quiet_torch

#: ``sdpa`` whose mask is always there: left to itself, Transformers does without where it takes a cache to be empty, and to know
#: that it reads the positions. "sdpa" in the name makes it ask whether a model has it.
_MASKED = "kogc_sdpa"
#: Ways to compute attention, the first that the model has: one op is easier to recognise than many.
_ATTENTION = (_MASKED, "sdpa", "eager")
#: The way to compute experts that a trace can follow, so that it gets as far as the op that is not recognised.
_EXPERTS = "batched_mm"


def _whole_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


transformers.AttentionInterface.register(_MASKED, sdpa_attention_forward)
AttentionMaskInterface.register(_MASKED, _whole_mask)


def build(folder: Path, run_code: bool = False) -> nn.Module:
    """The causal language model that ``folder``'s configuration describes, in evaluation mode and fp32.

    Parameters are on the meta device. Buffers (RoPE frequencies, say) have values: they follow from the configuration and
    are in no file. Code from the folder is run only if ``run_code`` says so; then it comes before what Transformers has of its own.

    Raises:
        FrontendError: Transformers does not know the model, it is no decoder, or its own code fails.
    """
    config = _config(folder, run_code)
    if getattr(config, "is_encoder_decoder", False):
        raise FrontendError(f"{folder}: {config.model_type} is an encoder-decoder; kogc compiles decoders, which read their own tokens alone")
    if not run_code and type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise FrontendError(f"{folder}: Transformers has no causal language model of type {config.model_type}")
    model = _built(config, str(folder), run_code)
    _drop_values(model)
    left = next((name for name, buffer in model.named_buffers() if buffer.is_meta), None)
    if left is not None:
        raise FrontendError(f"{folder}: {left} is a table that {type(model).__name__} leaves without values")
    return model.eval()


def _config(folder: Path, run_code: bool) -> Any:
    try:
        # False and not its default None, which asks on the terminal.
        with quiet_torch():  # what it logs comes back as an error
            whole = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=run_code)
        return whole.get_text_config(decoder=True)
    except Exception as error:  # whatever the configuration makes Transformers raise
        hint = "" if run_code else _hint(folder)
        raise FrontendError(f"{folder}: Transformers cannot read the configuration: {first_line(error)}{hint}") from error


def _hint(folder: Path) -> str:
    """What to do about a model that Transformers knows only by the folder's own code."""
    own = '"auto_map"' in (folder / "config.json").read_text(encoding="utf-8")
    return "; the folder brings code of its own: run that (--trust-remote-code) if you trust it" if own else ""


def _built(config: Any, where: str, run_code: bool) -> nn.Module:
    for attention in _ATTENTION:
        try:
            with _ValuesLater():
                return transformers.AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, attn_implementation=attention, experts_implementation=_EXPERTS, trust_remote_code=run_code
                )
        except Exception as error:  # whatever the configuration makes Transformers raise
            problem = error
    raise FrontendError(f"{where}: Transformers cannot build the model: {first_line(problem)}") from problem


class _ValuesLater(TorchFunctionMode):
    """``torch.empty`` gives meta tensors: what is made without a value is a parameter that a file has the value for."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _drop_values(model: nn.Module) -> None:
    """Parameters made with a value, such as norm scales of 1, go to the meta device; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                part._parameters[name] = made.setdefault(id(parameter), nn.Parameter(parameter.to("meta"), requires_grad=False))
