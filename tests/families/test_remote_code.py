"""A folder that brings its model's code along (``trust_remote_code``): that code runs when it is trusted, and never otherwise."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from against_torch import assert_close, compile_quickly, random_ids, random_model, torch_logits
from safetensors.torch import save_file
from transformers import dynamic_module_utils

from kogc.cli import main
from kogc.frontend.errors import FrontendError, UnsafeModelWarning
from kogc.frontend.load import load_model

CONTEXT = 20
CONFIG = {
    "model_type": "laneformer", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64,
    "vocab_size": 96, "max_position_embeddings": 64, "num_lanes": 2, "broadcast_delay": 2, "use_comm": True, "use_early_comm": True,
    "lm_head_type": "replicate", "sliding_window": 8, "swa_layers": [0, 1, 2], "norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
CODE = {"AutoConfig": "configuration_lanes.LanesConfig", "AutoModelForCausalLM": "modeling_lanes.LanesForCausalLM"}


@pytest.fixture(autouse=True, scope="module")
def _modules_here(tmp_path_factory):
    """Transformers copies code before it runs it: not into the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)
        yield


@pytest.fixture
def released(tmp_path) -> Path:
    """A Laneformer as it is released: configuration, code, and tensors with the names of the released checkpoint."""
    shutil.copytree(Path(__file__).with_name("remote_code"), tmp_path / "released")
    (tmp_path / "released" / "config.json").write_text(json.dumps({**CONFIG, "auto_map": CODE, "architectures": ["LanesForCausalLM"]}))
    save_file(dict(random_model(CONFIG, CONTEXT).state_dict()), tmp_path / "released" / "model.safetensors")
    return tmp_path / "released"


def without_names_of_caches(program: bytes) -> bytes:
    """Caches are no tensors of a checkpoint: each module calls them as it likes."""
    kinds = ((b"k", b"keys"), (b"v", b"values"))
    for short, long in kinds:
        program = re.sub(rb"model\.layers\.(\d+)\.attention\.cache\." + short, rb"cache_" + long + rb"_\1", bytes(program))
    return program


@pytest.mark.compiler
def test_the_folders_code_and_our_module_give_the_same_program_and_packed_weights(released, tmp_path):
    ours = compile_quickly(released, tmp_path, dtype="fp16", max_context=CONTEXT)
    (tmp_path / "theirs").mkdir()
    with pytest.warns(UnsafeModelWarning, match="released: this runs the model code of the folder"):
        theirs = compile_quickly(released, tmp_path / "theirs", dtype="fp16", max_context=CONTEXT, trust_remote_code=True)
    assert theirs.member("kernel.cpp") == ours.member("kernel.cpp")
    assert theirs.member("program.json") == without_names_of_caches(ours.member("program.json"))
    assert theirs.member("weights/rank-0.bin") == ours.member("weights/rank-0.bin")


@pytest.mark.compiler
def test_the_folders_code_is_what_is_compiled(released, tmp_path):
    """Its logits, in fp32, over all positions of a window and more."""
    with pytest.warns(UnsafeModelWarning):
        artifact = compile_quickly(released, tmp_path, dtype="fp32", max_context=CONTEXT, trust_remote_code=True)
    own = transformers.AutoModelForCausalLM.from_pretrained(released, trust_remote_code=True, attn_implementation="eager").eval()
    ids = random_ids(CONFIG["vocab_size"], CONTEXT)
    with torch.no_grad():
        want = own(torch.tensor([ids]), position_ids=torch.arange(CONTEXT)[None]).logits[0].numpy()
    assert_close(torch_logits(random_model(CONFIG, CONTEXT), ids), want, "fp32")
    with artifact.engine() as engine:
        assert_close(engine.logits(ids), want, "fp32")


@pytest.fixture
def trap(released) -> Path:
    """The file that the folder's code would write."""
    written = released.parent / "ran"
    for code in released.glob("*.py"):
        code.write_text(f"open({str(written)!r}, 'w').close()\n{code.read_text()}")
    return written


def test_no_code_runs_unless_it_is_trusted(released, trap):
    load_model(released, max_context=CONTEXT)
    config = json.loads((released / "config.json").read_text())
    (released / "config.json").write_text(json.dumps({**config, "model_type": "nobody-knows"}))
    with pytest.raises(FrontendError, match=r"the folder brings code of its own: run that \(--trust-remote-code\) if you trust it"):
        load_model(released, max_context=CONTEXT)
    assert not trap.exists()


def test_who_trusts_the_code_is_told_that_it_runs(released, trap, capfd):
    with pytest.raises(SystemExit) as left:
        main(["explain", str(released), "--max-context", str(CONTEXT), "--trust-remote-code"])
    assert left.value.code == 0 and trap.exists()
    assert "released: this runs the model code of the folder" in capfd.readouterr().err


def test_code_that_fails_is_one_line(released):
    broken = released.rename(released.parent / "broken")  # Transformers remembers what is in a folder of some name
    (broken / "modeling_lanes.py").write_text("raise RuntimeError('made of mistakes')\n")
    with pytest.warns(UnsafeModelWarning), pytest.raises(FrontendError, match="Transformers cannot build the model: made of mistakes"):
        load_model(broken, max_context=CONTEXT, trust_remote_code=True)
