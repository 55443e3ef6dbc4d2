"""Hostile models: each refused with one line that says what and where, and nothing mistaken for something else."""

import json

import pytest
import torch
from torch import nn

import decoder_styles
from kogc.compiler import compile_model
from kogc.errors import BadInput, OutputFailure
from kogc.frontend.errors import FrontendError, UnsafeModelWarning
from kogc.frontend.load import load_model
from kogc.frontend.trace import trace
from kogc.models.build import build_model
from kogc.models.presets import PRESETS

TINY = {**PRESETS["llama-tiny"], "num_hidden_layers": 1, "vocab_size": 32}
KEY = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture
def state():
    torch.manual_seed(0)
    return build_model(TINY, 8).state_dict()


@pytest.fixture
def save(tmp_path, state):
    def make(config=TINY, tensors=None, **parts):
        path = tmp_path / "m.pt"
        torch.save({"config": config, "state_dict": {**state, **(tensors or {})}, **parts}, path)
        return path

    return make


def refusal(call, kind=FrontendError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_odd_tensors(save, state):
    assert "stored as torch.sparse_coo; save it dense" in refusal(lambda: load_model(save(tensors={KEY: state[KEY].to_sparse()})))
    assert "5 in the state dict is not a tensor's name" in refusal(lambda: load_model(save(tensors={5: state[KEY]})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000, expected at most"),
        ({"model_type": ["llama"]}, "`model_type` is ['llama'], expected one of"),
        ({"eos_token_id": "x"}, "`eos_token_id` holds 'x'"),
        ({"eos_token_id": [1, 2.0]}, "`eos_token_id` holds 2.0"),
        ({"bos_token_id": "<s>"}, "`bos_token_id` is '<s>', expected a token id below 32"),
        ({"bos_token_id": 32}, "`bos_token_id` is 32, expected a token id below 32"),
    ],
)
def test_odd_configurations(save, change, message):
    assert message in refusal(lambda: load_model(save({**TINY, **change})))


def test_ending_ids_that_never_come_are_dropped(save):
    assert load_model(save({**TINY, "eos_token_id": [3, -1, 32, 2**40]})).eos_ids == (3,)


def test_odd_texts(save):
    assert "is not a tokenizer.json" in refusal(lambda: load_model(save(tokenizer="{not json")))
    assert '"chat_template" is of type bytes' in refusal(lambda: load_model(save(chat_template=b"x")))


def test_a_tokenizer_that_is_missing(save, tmp_path):
    assert refusal(lambda: load_model(save(), tokenizer=tmp_path / "none")).endswith("cannot be read: No such file or directory")


def test_unpickling_warns_as_kogc(tmp_path):
    torch.save(build_model(TINY, 8), tmp_path / "module.pt")
    with pytest.warns(UnsafeModelWarning, match="runs code from the file"):
        load_model(tmp_path / "module.pt", allow_pickle=True)


def test_what_a_live_module_computes_is_part_of_its_identity():
    """Its Python attributes show neither in its weights nor in its repr, and an old artifact must not pass for the new."""

    def decoder(eps):
        module = decoder_styles.decoder(decoder_styles.HuggingFace).eval()
        for norm in (part for part in module.modules() if isinstance(part, decoder_styles.RMSNorm)):
            norm.eps = eps
        return load_model(module)

    assert decoder(1e-5).identity == decoder(1e-5).identity != decoder(10.0).identity


def test_torch_export_does_not_talk(capfd):
    class ReadsPosition(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 8)
            self.register_buffer("k", torch.zeros(1, 16, 8))

        def forward(self, token, position):
            self.k[0, int(position[0])] = 0
            return self.embed(token)

    assert "must not read tensor values into Python" in refusal(lambda: trace(ReadsPosition()))
    assert capfd.readouterr() == ("", "")


# ── options of a compile, refused before any work ──


def test_missing_weights_are_noticed_at_once(tmp_path):
    steps = []
    call = lambda: compile_model("preset:llama-tiny", output=tmp_path / "a.kog", progress=lambda step, *_: steps.append(step))  # noqa: E731
    assert "--random-weights" in refusal(call, BadInput)
    assert steps == ["reading the model"]


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 10**6}, {"workers": 1.5}, {"max_context": 1}, {"max_context": "5"}])
def test_odd_numbers(save, options):
    assert f"{next(iter(options))} is {next(iter(options.values()))!r}, expected an integer" in refusal(lambda: compile_model(save(), **options), BadInput)


def test_what_must_not_be_overwritten(save, tmp_path):
    model = save()
    before = model.read_bytes()
    assert "it is the model itself" in refusal(lambda: compile_model(model, output=model), BadInput)
    (tmp_path / "link.kog").symlink_to(model)
    assert "it is the model itself" in refusal(lambda: compile_model(model, output=tmp_path / "link.kog"), BadInput)
    (tmp_path / "notes.json").write_text(json.dumps({}))
    assert "is no kogc artifact" in refusal(lambda: compile_model(model, output=tmp_path / "notes.json"), BadInput)
    assert model.read_bytes() == before and (tmp_path / "notes.json").read_text() == "{}"


def test_a_pipe_is_no_place_for_an_artifact(save, tmp_path):
    import os

    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    os.mkfifo(tmp_path / "pipe.kog")
    assert "it is a device or a pipe" in refusal(lambda: compile_model(save(), output=tmp_path / "pipe.kog"), OutputFailure)
    assert (tmp_path / "pipe.kog").is_fifo()
