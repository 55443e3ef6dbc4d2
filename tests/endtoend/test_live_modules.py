"""Hand-written modules in many styles, compiled as they are: the kernel computes what the module computes."""

import copy
import inspect

import decoder_styles
import pytest
import torch
from against_torch import assert_close, assert_greedy, compile_quickly, generated, random_ids, torch_logits
from decoder_styles import CAPACITY, VOCAB, decoder
from torch import nn

import kogc
from kogc.frontend.errors import FrontendError
from kogc.ir.graph import GraphError
from kogc.reference import matrix_keys

pytestmark = [pytest.mark.compiler, pytest.mark.slow]


STYLES = [
    decoder_styles.GptFast,
    decoder_styles.HuggingFace,
    decoder_styles.GroupedEinsum,
    decoder_styles.SlicedPairs,
    decoder_styles.MatmulWeights,
    decoder_styles.Conv1dFused,
    decoder_styles.QueryChunks,
]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_logits_equal_the_modules(style, tmp_path):
    """A module in fp64, read in fp32. It is left as it was: the compiler reads it and runs a copy."""
    module = decoder(style).eval()
    before = copy.deepcopy(module.state_dict())
    with compile_quickly(module, tmp_path, workers=2) as artifact, artifact.engine() as engine:
        assert artifact.manifest.dtype == "fp32" and artifact.manifest.context == CAPACITY
        ids = random_ids(VOCAB, CAPACITY)
        assert_close(engine.logits(ids), torch_logits(copy.deepcopy(module), ids, step=4), "fp32")
        tokens = generated(engine, ids[:5], 10)
        assert_greedy(tokens, torch_logits(copy.deepcopy(module), ids[:5] + tokens[:-1], step=1)[4:], "fp32")
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("style", [decoder_styles.GroupedEinsum, decoder_styles.MatmulWeights, decoder_styles.Conv1dFused], ids=lambda style: style.__name__)
def test_modules_are_cut_over_ranks_however_they_store_their_weights(style, tmp_path):
    module = decoder(style).eval()
    with compile_quickly(module, tmp_path, workers=1, tp=2) as artifact, artifact.engine() as engine:
        ids = random_ids(VOCAB, CAPACITY)
        assert_close(engine.logits(ids), torch_logits(copy.deepcopy(module), ids, step=4), "fp32")


def test_a_context_beyond_the_modules_caches_is_refused(tmp_path):
    with pytest.raises(FrontendError, match=f"a context of 21 was asked for, its caches hold {CAPACITY} positions"):
        compile_quickly(decoder(decoder_styles.GroupedEinsum).eval(), tmp_path, max_context=CAPACITY + 1)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_gate_rounds_what_is_stored_in_another_shape(dtype, tmp_path):
    """The reference of the gate holds the artifact's rounded weights, also those that the module stores transposed, and is
    run in fp64 where the module is."""
    artifact = kogc.compile(decoder(decoder_styles.MatmulWeights).eval(), target="cpu", output=tmp_path / "m.kog", dtype=dtype, workers=2)
    assert artifact.manifest.gate["passed"]
    assert matrix_keys(artifact.ir) >= {f"blocks.{layer}.attention.{name}" for layer in (0, 1) for name in ("wq", "wk", "wv", "wo")}


class Spectral(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x, dim=-1).real.repeat(1, 2)[:, : x.shape[-1]]


class Cumulative(nn.Module):
    def forward(self, x):
        return torch.cumsum(x, dim=-1)


@pytest.mark.parametrize("mlp, op", [(Spectral, "fft"), (Cumulative, "cumsum")])
def test_an_unsupported_op_is_named_with_the_users_line(mlp, op, tmp_path):
    """The line is the one in this file that calls the op."""
    with pytest.raises(GraphError) as caught:
        compile_quickly(decoder(decoder_styles.HuggingFace, mlp=mlp).eval(), tmp_path)
    lines, first = inspect.getsourcelines(mlp.forward)
    message = str(caught.value)
    assert op in message and f"test_live_modules.py:{first + len(lines) - 1}" in message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "model.kog").exists()
