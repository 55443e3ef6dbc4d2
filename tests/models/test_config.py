"""Reading configurations: both spellings, harmless metadata, and errors that name the field."""

import pytest

from kogc.models.build import build_model, parse_config
from kogc.models.config import ConfigError, LaneformerConfig, LlamaConfig, RopeScaling
from kogc.models.presets import PRESETS

LANES = PRESETS["laneformer-tiny"]
LLAMA = PRESETS["llama-tiny"]


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def test_split_communication_flags():
    config = LaneformerConfig.from_dict(
        without(LANES, "use_comm") | {"use_attention_comm": True, "use_mlp_comm": False}
    )
    assert (config.use_attention_comm, config.use_mlp_comm) == (True, False)


@pytest.mark.parametrize(
    ("count", "unclamped", "expected"),
    [(2, [], (0, 1)), (3, [1], (0, 2)), (-1, [], (3,)), (-3, [2], (1, 3)), (0, [], ()), (4, [0, 3], (1, 2))],
)
def test_counted_window_layers(count, unclamped, expected):
    values = without(LANES, "swa_layers") | {"sliding_window_n_layers": count, "unclamped_layers": unclamped}
    assert LaneformerConfig.from_dict(values).window_layers == expected


def test_both_window_spellings_may_agree():
    values = LANES | {"swa_layers": [1, 0], "sliding_window_n_layers": 2}
    assert LaneformerConfig.from_dict(values).window_layers == (0, 1)


def test_one_lane_needs_no_lane_fields():
    values = without(LANES, "broadcast_delay", "use_early_comm", "lm_head_type") | {"num_lanes": 1}
    assert LaneformerConfig.from_dict(values).lm_head_type == "replicate"


@pytest.mark.parametrize("model_type", ["laneformer", "laneformer_tp"])
def test_both_laneformer_types(model_type):
    assert isinstance(parse_config(LANES | {"model_type": model_type}), LaneformerConfig)


def test_transformers_metadata_is_ignored():
    extra = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "transformers_version": "5.0.0",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": None,
        "use_cache": True,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "mlp_bias": False,
        "attention_bias": False,
        "auto_map": {"AutoModel": "x.y"},
        "_name_or_path": "somewhere",
        "pretraining_tp": 1,
        "quantization_config": None,
    }
    assert LlamaConfig.from_dict(LLAMA | extra) == LlamaConfig.from_dict(LLAMA)
    assert LaneformerConfig.from_dict(LANES | extra) == LaneformerConfig.from_dict(LANES)


def test_rope_parameters_of_transformers_5():
    old = LlamaConfig.from_dict(PRESETS["llama-3.1-8b"])
    section = PRESETS["llama-3.1-8b"]["rope_scaling"] | {"rope_theta": 500000.0}
    new = without(PRESETS["llama-3.1-8b"], "rope_scaling", "rope_theta") | {"rope_parameters": section}
    assert LlamaConfig.from_dict(new) == old
    assert old.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


def test_default_rope_type_means_no_scaling():
    config = LlamaConfig.from_dict(LLAMA | {"rope_scaling": {"type": "default"}})
    assert config.rope_scaling is None


LANE_ERRORS = {
    "unknown": ({"qk_norm": True}, "`qk_norm`"),
    "quantized": ({"quantization_config": {"bits": 4}}, "`quantization_config`"),
    "heads-by-lanes": ({"num_lanes": 3}, "`num_attention_heads` is 8, expected a multiple of `num_lanes` = 3"),
    "kv-by-lanes": ({"num_key_value_heads": 2}, "`num_key_value_heads` is 2, expected a multiple of `num_lanes`"),
    "ffn-by-lanes": ({"intermediate_size": 130}, "`intermediate_size` is 130"),
    "vocab-by-lanes": ({"lm_head_type": "vocab_parallel", "vocab_size": 255}, "`vocab_size` is 255"),
    "kv-by-heads": ({"num_key_value_heads": 3}, "`num_attention_heads` is 8, expected a multiple of"),
    "hidden-by-heads": ({"hidden_size": 63}, "`hidden_size` is 63"),
    "odd-head": ({"head_dim": 7}, "head dimension is 7"),
    "head-type": ({"lm_head_type": "wide"}, "`lm_head_type` is 'wide', expected one of replicate, lane, vocab"),
    "agg-head": ({"pre_norm_lane_agg": True, "lm_head_type": "lane"}, "`pre_norm_lane_agg` needs"),
    "tied-head": ({"tie_word_embeddings": True, "lm_head_type": "lane"}, "`tie_word_embeddings` needs"),
    "comm": ({"use_mlp_comm": False}, "`use_mlp_comm` is False but `use_comm` is True"),
    "negative-delay": ({"broadcast_delay": -1}, "`broadcast_delay` is -1, expected an integer of at least 0"),
    "no-delay": ({"broadcast_delay": None}, "`broadcast_delay` is missing"),
    "no-early": ({"use_early_comm": None}, "`use_early_comm` is missing"),
    "no-head-type": ({"lm_head_type": None}, "`lm_head_type` is missing"),
    "no-window": ({"sliding_window": None}, "`sliding_window` is missing"),
    "zero-window": ({"sliding_window": 0}, "`sliding_window` is 0"),
    "window-range": ({"swa_layers": [4]}, r"`swa_layers` lists layers \[4\], expected 0 to 3"),
    "window-count": ({"sliding_window_n_layers": 5}, "`sliding_window_n_layers` is 5"),
    "window-count-negative": ({"sliding_window_n_layers": -5}, "`sliding_window_n_layers` is -5"),
    "window-clash": ({"sliding_window_n_layers": 3}, "`swa_layers` lists"),
    "window-unclamped": ({"unclamped_layers": [0]}, "`unclamped_layers`"),
    "bias": ({"attention_bias": True}, "`attention_bias` is true"),
    "eps": ({"norm_eps": 0}, "`norm_eps` is 0"),
    "infinite-theta": ({"rope_theta": float("inf")}, "`rope_theta` is inf"),
    "two-eps": ({"rms_norm_eps": 1e-6}, "`norm_eps` is 1e-05 but `rms_norm_eps` is 1e-06"),
    "bool-as-int": ({"num_hidden_layers": True}, "`num_hidden_layers` is True, expected an integer"),
    "int-as-bool": ({"use_comm": 1}, "`use_comm` is 1, expected true or false"),
    "missing": ({"hidden_size": None}, "`hidden_size` is missing"),
}


@pytest.mark.parametrize("case", LANE_ERRORS)
def test_laneformer_errors_name_the_field(case):
    changes, message = LANE_ERRORS[case]
    with pytest.raises(ConfigError, match=message):
        LaneformerConfig.from_dict(LANES | changes)


LLAMA_ERRORS = {
    "unknown": ({"sliding_window": 8}, "`sliding_window`"),
    "activation": ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu', only 'silu' is supported"),
    "interleaved": ({"rope_interleaved": True}, "`rope_interleaved`"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn"}}, "`rope_type` is 'yarn', expected one of default, llama3"),
    "rope-missing": ({"rope_scaling": {"rope_type": "llama3"}}, "`factor` is missing"),
    "rope-unknown": ({"rope_scaling": {"rope_type": "default", "beta": 2}}, "`beta` = 2"),
    "rope-theta": ({"rope_parameters": {"rope_theta": 5.0}}, "`rope_theta` is 5.0 here"),
    "kv-by-heads": ({"num_key_value_heads": 3}, "`num_attention_heads` is 4"),
}


@pytest.mark.parametrize("case", LLAMA_ERRORS)
def test_llama_errors_name_the_field(case):
    changes, message = LLAMA_ERRORS[case]
    with pytest.raises(ConfigError, match=message):
        LlamaConfig.from_dict(LLAMA | changes)


def test_frequency_factors_must_be_in_order():
    scaling = PRESETS["llama-3.1-8b"]["rope_scaling"] | {"low_freq_factor": 4.0}
    with pytest.raises(ConfigError, match="`high_freq_factor` is 4.0, expected more than"):
        LlamaConfig.from_dict(LLAMA | {"rope_scaling": scaling})


@pytest.mark.parametrize("model_type", ["gpt2", None])
def test_unknown_model_type_lists_the_known(model_type):
    with pytest.raises(ConfigError, match="expected one of laneformer, laneformer_tp, llama"):
        build_model({"model_type": model_type}, 8)
