"""Every kind of model input: what comes out, and one clear line for what cannot be used."""

import json
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from kogc.frontend.errors import FrontendError
from kogc.frontend.gguf import rotate_half_rows
from kogc.frontend.load import load_model
from kogc.frontend.sources import RandomWeights
from kogc.frontend.trace import trace
from kogc.models.build import build_model
from kogc.models.presets import PRESETS

torch.set_num_threads(1)
TINY = {**PRESETS["llama-tiny"], "num_hidden_layers": 1, "vocab_size": 32, "eos_token_id": [2, 3], "bos_token_id": 1}
TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})


@pytest.fixture
def state():
    torch.manual_seed(0)
    return build_model(TINY, 8).half().state_dict()


@pytest.fixture
def checkpoint(tmp_path, state):
    """Saves a checkpoint, with changes, and returns its path."""

    def save(**changes):
        path = tmp_path / "tiny.pt"
        torch.save({"config": TINY, "state_dict": state, **changes}, path)
        return path

    return save


@pytest.fixture
def folder(tmp_path, state):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    names = list(state)
    save_file({name: state[name] for name in names[:4]}, tmp_path / "a.safetensors")
    save_file({name: state[name] for name in names[4:]}, tmp_path / "b.safetensors")
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    return tmp_path


def test_checkpoint(checkpoint, state):
    path = checkpoint(tokenizer=TOKENIZER)
    model = load_model(str(path), max_context=16)
    assert (model.name, model.context, model.dtype) == ("tiny", 16, "fp16")
    assert (model.eos_ids, model.bos_id, model.tokenizer_json) == ((2, 3), 1, TOKENIZER)
    assert set(model.weights.keys()) == set(state)
    for name, tensor in state.items():
        np.testing.assert_array_equal(model.weights.get(name), tensor.numpy())
    graph = trace(model.module)
    assert {node.attrs["key"] for node in graph if node.op == "weight"} == set(state)
    assert graph.meta["capacity"] == 16
    assert model.identity == load_model(path).identity
    checkpoint(tokenizer=None)
    assert model.identity != load_model(path).identity


def test_bfloat16_checkpoint(checkpoint, state):
    model = load_model(checkpoint(state_dict={name: tensor.bfloat16() for name, tensor in state.items()}))
    assert model.dtype == "bf16"
    value = model.weights.get("model.norm.weight")
    assert value.dtype.name == "bfloat16" and np.all(value == 1)


def test_huggingface_folder(folder, state):
    model = load_model(folder)
    assert (model.name, model.context, model.eos_ids, model.bos_id) == (folder.name, 128, (7,), 1)
    assert (model.tokenizer_json, model.chat_template, model.dtype) == (TOKENIZER, "{{ messages }}", "fp16")
    for name, tensor in state.items():
        np.testing.assert_array_equal(model.weights.get(name), tensor.numpy())


def test_live_module_shares_its_parameters():
    module = build_model(TINY, 8)
    model = load_model(module)
    assert (model.name, model.context, model.dtype) == ("Llama", None, "fp32")
    assert np.shares_memory(model.weights.get("model.norm.weight"), module.model.norm.weight.detach().numpy())
    assert model.identity == load_model(module).identity
    assert load_model(module, max_context=5).context == 5
    assert "a context of 0 was asked for" in error_of(module, max_context=0)
    module.model.norm.weight.data[0] = 2
    assert model.identity != load_model(module).identity


def test_preset_has_weights_only_when_asked():
    model = load_model("preset:laneformer-tiny", max_context=32)
    assert model.module.capacity == 32
    with pytest.raises(FrontendError, match="preset:laneformer-tiny has no weights; ask for random ones"):
        model.weights.get("lm_head.weight")
    model = load_model("preset:laneformer-tiny", random_weights=True)
    again = load_model("preset:laneformer-tiny", random_weights=True)
    other = load_model("preset:laneformer-tiny", random_weights=True, seed=1)
    head = model.weights.get("lm_head.weight")
    assert head.dtype == np.float16 and head.shape == (256, 64)
    np.testing.assert_array_equal(head, again.weights.get("lm_head.weight"))
    assert not np.array_equal(head, other.weights.get("lm_head.weight"))
    assert model.identity == again.identity != other.identity
    assert np.all(model.weights.get("model.norm.weight") == 1)


def test_random_rows_differ_and_have_the_promised_size():
    weights = RandomWeights({"a": (5000, 4096), "b": (3, 64)}, "bf16")
    value = weights.get("a").astype(np.float32)
    assert abs(value.std() * 64 - 1) < 0.01 and abs(value.mean() * 64) < 0.01
    assert len(np.unique(value[:, 0])) > 200  # bf16 has few values; aligned rows would have one per block
    assert not np.array_equal(value[0], value[1024])
    assert abs(weights.get("b").astype(np.float32).std() * 8 - 1) < 0.2


def test_tokenizer_can_be_given_separately(checkpoint, tmp_path):
    path = checkpoint()
    (tmp_path / "t.json").write_text(TOKENIZER)
    assert load_model(path).tokenizer_json is None
    assert load_model(path, tokenizer=tmp_path / "t.json").tokenizer_json == TOKENIZER
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(FrontendError, match="is not a tokenizer.json"):
        load_model(path, tokenizer=tmp_path / "t.json")


def error_of(source, **options):
    with pytest.raises(FrontendError) as caught:
        model = load_model(source, **options)
        for name in model.weights.keys():
            model.weights.get(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_are_no_models(tmp_path, checkpoint):
    def file(content):
        (tmp_path / "x").write_bytes(content)
        return tmp_path / "x"

    assert "No such file" in error_of(tmp_path / "absent.pt")
    assert "is empty" in error_of(file(b""))
    assert "is not a model file; expected a PyTorch checkpoint" in error_of(file(b"hello, world, this is text"))
    assert "truncated or damaged" in error_of(file(checkpoint().read_bytes()[:5000]))
    assert "is damaged, or holds pickled objects" in error_of(file(b"\x80\x02garbage"))
    assert "truncated" in error_of(file(b"GGUF\3\0\0\0" + b"\xff" * 40))
    assert "GGUF version 50331648" in error_of(file(b"GGUF\0\0\0\3" + bytes(40)))
    assert "a folder without config.json" in error_of(tmp_path)
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        archive.writestr("manifest.json", "{}")
    assert "compiled artifact already" in error_of(tmp_path / "x")
    assert "did you mean llama-tiny? known:" in error_of("preset:llama-tyni")
    assert "random weights are for presets" in error_of(checkpoint(), random_weights=True)


def test_checkpoints_that_do_not_fit(checkpoint, state):
    norm = "model.norm.weight"
    without = {name: tensor for name, tensor in state.items() if name != norm}
    nan = state["model.layers.0.mlp.up_proj.weight"].clone()
    nan[3, 5] = float("nan")
    assert 'has no "config" (keys: config, state_dict)' in error_of(checkpoint(config=None))
    assert f"tensor {norm} is missing" in error_of(checkpoint(state_dict=without))
    assert "tensor extra is unexpected" in error_of(checkpoint(state_dict={**state, "extra": torch.ones(1)}))
    assert f"tensor {norm} has shape [3], the configuration needs [64]" in error_of(
        checkpoint(state_dict={**state, norm: torch.ones(3)})
    )
    assert "up_proj.weight holds 1 NaN or infinite values, the first (nan) at [3, 5]" in error_of(
        checkpoint(state_dict={**state, "model.layers.0.mlp.up_proj.weight": nan})
    )
    assert "torch.int8 are not supported" in error_of(checkpoint(state_dict={**state, norm: torch.ones(64).to(torch.int8)}))
    assert "`model_type` is 'mamba'" in error_of(checkpoint(config={**TINY, "model_type": "mamba"}))
    assert "a context of 999 was asked for, the model has 128 positions" in error_of(checkpoint(), max_context=999)
    # A tied head and tables that follow from the configuration may be there.
    harmless = {"lm_head.weight": state["model.embed_tokens.weight"], "model.rotary_emb.inv_freq": torch.ones(8)}
    load_model(checkpoint(state_dict={**state, **harmless}))


def test_pickled_module_only_when_allowed(tmp_path):
    path = tmp_path / "module.pt"
    torch.save(build_model(TINY, 8), path)
    assert "pickled object kogc.models.llama.Llama; loading it would run code from the file" in error_of(path)
    with pytest.warns(UserWarning, match="runs code from the file"):
        model = load_model(path, allow_pickle=True)
    assert (model.name, model.context) == ("module", None)


def test_folders_that_do_not_fit(folder, state):
    (folder / "b.safetensors").write_bytes((folder / "b.safetensors").read_bytes()[:-100])
    assert "b.safetensors is missing, truncated or damaged" in error_of(folder)
    assert "tensors without a configuration" in error_of(folder / "a.safetensors")
    (folder / "b.safetensors").unlink()
    assert "is missing (and " in error_of(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "c.safetensors"}}))
    assert "c.safetensors is missing, truncated or damaged" in error_of(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is not JSON" in error_of(folder)


# ── GGUF ──


def gguf_bytes(metadata, tensors):
    """A small GGUF file: values are int, float, str or lists of them; tensors fp32."""

    def text(value):
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def typed(value):
        if isinstance(value, bool):
            return 7, struct.pack("<?", value)
        if isinstance(value, int):
            return 4, struct.pack("<I", value)
        if isinstance(value, float):
            return 6, struct.pack("<f", value)
        if isinstance(value, str):
            return 8, text(value)
        inner = [typed(item) for item in value]
        return 9, struct.pack("<IQ", inner[0][0], len(inner)) + b"".join(item for _, item in inner)

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, data = typed(value)
        head += text(key) + struct.pack("<I", kind) + data
    data = b""
    for name, value in tensors.items():
        head += text(name) + struct.pack("<I", value.ndim) + struct.pack(f"<{value.ndim}Q", *reversed(value.shape))
        head += struct.pack("<IQ", 0, len(data))
        data += value.astype("<f4").tobytes() + bytes(-value.nbytes % 32)
    return head + bytes(-len(head) % 32) + data


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
METADATA = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 64, "llama.feed_forward_length": 160,
    "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0, "llama.rope.dimension_count": 16,
    "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1,
}  # fmt: skip
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x21>", "▁", "a", "b", "ab", "▁a", "▁ab"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -2.0, -3.0, -1.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1, 1],
}


@pytest.fixture
def gguf(tmp_path, state):
    tensors = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    for name, stored in GGUF_NAMES.items():
        value = state[f"model.layers.0.{name}.weight"]
        if stored in ("attn_q", "attn_k"):  # halves of a head → pairs side by side
            value = value.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(value.shape)
        tensors[f"blk.0.{stored}.weight"] = value
    tensors = {name: value.numpy() for name, value in tensors.items()}

    def write(metadata=None, more=None):
        path = tmp_path / "tiny.gguf"
        path.write_bytes(gguf_bytes({**METADATA, **(metadata or {})}, {**tensors, **(more or {})}))
        return path

    return write


def test_gguf(gguf, state):
    model = load_model(gguf())
    assert (model.context, model.eos_ids, model.bos_id, model.tokenizer_json) == (128, (2,), 1, None)
    assert model.config["rms_norm_eps"] == 1e-5 and model.config["tie_word_embeddings"]
    for name, tensor in state.items():
        np.testing.assert_array_equal(model.weights.get(name), tensor.float().numpy())


def test_gguf_llama3_scaling_is_recognised(gguf):
    frequency = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    keep = np.clip((frequency * 8192 / (2 * np.pi) - 1) / 3, 0, 1)
    model = load_model(gguf(more={"rope_freqs.weight": 1 / (keep + (1 - keep) / 8)}))
    assert model.config["rope_scaling"]["factor"] == 8
    assert "rope_freqs.weight stretches RoPE" in error_of(gguf(more={"rope_freqs.weight": np.full(8, 2.0)}))


def test_gguf_that_does_not_fit(gguf):
    assert "architecture 'gemma'" in error_of(gguf({"general.architecture": "gemma"}))
    assert "llama.rope.scaling.type is 'yarn'" in error_of(gguf({"llama.rope.scaling.type": "yarn"}))
    assert "llama.rope.dimension_count is 8" in error_of(gguf({"llama.rope.dimension_count": 8}))
    assert "tensor blk.0.odd.weight is unexpected" in error_of(gguf(more={"blk.0.odd.weight": np.ones(2)}))
    path = gguf()
    path.write_bytes(path.read_bytes()[:-1000])
    assert "is truncated: it has" in error_of(path)
    assert "text splitting 'odd' is not known" in error_of(
        gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "odd"})
    )


def test_gguf_sentencepiece_tokenizer(gguf):
    tokenizer = Tokenizer.from_str(load_model(gguf(SPM)).tokenizer_json)
    assert tokenizer.encode("ab b").ids == [1, 9, 4, 6]
    assert tokenizer.encode("aab!").tokens == ["<s>", "▁a", "ab", "<0x21>"]
    assert tokenizer.encode("a</s>").ids == [1, 8, 2]
    assert tokenizer.decode([1, 9, 4, 6, 3]) == "ab b!"


def test_gguf_row_order_is_undone():
    rows = np.arange(12)[:, None]  # two heads of six: pairs (0, 3), (1, 4), (2, 5) of each head
    stored = rows.reshape(2, 2, 3, 1).swapaxes(1, 2).reshape(12, 1)
    np.testing.assert_array_equal(rotate_half_rows(stored, 6), rows)
