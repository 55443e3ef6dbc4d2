"""Weights under the names that files have: older ones, those of a base model, and those of a larger model that holds the decoder."""

from pathlib import Path

import pytest
import torch
import transformers
from against_torch import assert_close, compile_quickly, random_ids
from random_model import config_of, random_model
from safetensors.torch import load_file, save_file
from shapes import CONTEXT, SHAPES

from kogc.frontend.errors import FrontendError
from kogc.frontend.load import load_model

pytestmark = pytest.mark.compiler


def saved(model, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def check(model, folder: Path, tmp_path: Path) -> None:
    artifact = compile_quickly(folder, tmp_path, dtype="fp32", max_context=CONTEXT)
    ids = [token % 93 for token in random_ids(96, 16)]  # no image tokens
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    with artifact.engine() as engine:
        assert_close(engine.logits(ids), want, "fp32")


def test_files_of_a_base_model_with_masks_in_them(tmp_path: Path):
    """As GPT-2 was released: no prefix, and the causal mask of every layer among the weights."""
    model = random_model(next(shape for shape in SHAPES if shape.family == "gpt2"))
    tensors = saved(model, tmp_path / "model")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8).tril() for layer in range(2)}
    save_file(old, tmp_path / "model" / "model.safetensors")
    check(model, tmp_path / "model", tmp_path)


def test_a_decoder_inside_a_model_that_also_sees(tmp_path: Path):
    text = config_of(next(shape for shape in SHAPES if shape.family == "gemma3"))
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=transformers.SiglipVisionConfig(**sizes), mm_tokens_per_image=4, image_token_index=95,
        boi_token_index=94, eoi_token_index=93,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    tensors = saved(model, tmp_path / "model")
    assert any(name.startswith("vision_tower.") for name in tensors)
    check(model, tmp_path / "model", tmp_path)


def test_weights_in_shards_stay_in_their_files(tmp_path: Path):
    model = random_model(next(shape for shape in SHAPES if shape.family == "qwen3"))
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    loaded = load_model(tmp_path / "model", max_context=CONTEXT)
    assert not any(tensor.device.type != "meta" for tensor in loaded.module.parameters())
    check(model, tmp_path / "model", tmp_path)


def test_a_tensor_that_belongs_nowhere_is_named(tmp_path: Path):
    model = random_model(next(shape for shape in SHAPES if shape.family == "mistral"))
    tensors = saved(model, tmp_path)
    save_file(tensors | {"model.layers.0.extra.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(FrontendError, match="tensor model.layers.0.extra.weight is unexpected"):
        load_model(tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if "norm" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(FrontendError, match="norm.weight is missing"):
        load_model(tmp_path)


def test_tensors_that_are_stored_in_pieces_are_refused_when_they_are_read(tmp_path: Path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=2, max_position_embeddings=64)).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    with pytest.raises(FrontendError, match=r"experts.1.*is a piece of model.layers.0.mlp.experts"):
        loaded.weights.get("model.layers.0.mlp.experts.gate_up_proj")
