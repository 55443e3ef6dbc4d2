"""Configurations of the reference models, read from Transformers-style dicts (`config.json`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kogc.models.fields import ConfigError, FieldReader

__all__ = ["ConfigError", "LaneformerConfig", "LlamaConfig", "RopeScaling"]

#: More is a damaged file: building the modules alone would take all memory.
MAX_LAYERS = 4096

HEAD_TYPES = ("replicate", "lane", "vocab_parallel")


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3-style stretching of the slow RoPE frequencies.

    Wavelengths (in positions) beyond `original_context / low_freq_factor` are stretched by `factor`, those below
    `original_context / high_freq_factor` are kept, and between the two the frequency is interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama model; field names and meanings are those of Transformers' `LlamaConfig`."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LlamaConfig":
        """Read a Transformers Llama config dict.

        Raises:
            ConfigError: a field is missing, not understood, or inconsistent with another.
        """
        read = FieldReader(values, "llama")
        shape = _read_shape(read)
        theta, scaling = _read_rope(read)
        config = cls(
            **shape,
            rms_norm_eps=read.positive("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            attention_bias=read.boolean("attention_bias", False),
            mlp_bias=read.boolean("mlp_bias", False),
        )
        read.finish()
        return config


@dataclass(frozen=True)
class LaneformerConfig:
    """Shape and communication rule of a Laneformer.

    `window_layers` holds the layer indices whose attention sees only the last `sliding_window` positions.
    `broadcast_delay` counts layers. `use_attention_comm` / `use_mlp_comm` say whether lanes exchange the outputs of
    that sub-block at all; `use_early_comm` says whether the first `broadcast_delay` layers sum without delay.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    num_lanes: int
    broadcast_delay: int
    use_attention_comm: bool
    use_mlp_comm: bool
    use_early_comm: bool
    lm_head_type: str
    pre_norm_lane_agg: bool
    replicated_rmsn_scale: bool
    sliding_window: int | None
    window_layers: tuple[int, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LaneformerConfig":
        """Read a Laneformer config dict in either public spelling.

        With more than one lane `broadcast_delay`, `lm_head_type` and (for a delay above 0) `use_early_comm` must be
        given: they change what the model computes and no default is published.

        Raises:
            ConfigError: a field is missing, not understood, or inconsistent with another.
        """
        read = FieldReader(values, "laneformer")
        for name in ("attention_bias", "mlp_bias"):
            read.require(not read.boolean(name, False), f"`{name}` is true, but Laneformer has no biases")
        shape = _read_shape(read)
        theta, scaling = _read_rope(read)
        window, window_layers = _read_window(read, shape["num_hidden_layers"])
        config = cls(
            **shape,
            **_read_lanes(read),
            norm_eps=read.positive(read.one_of(("norm_eps", "rms_norm_eps")), 1e-5),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            replicated_rmsn_scale=read.boolean("replicated_rmsn_scale", True),
            sliding_window=window,
            window_layers=window_layers,
        )
        _check_lanes(read, config)
        read.finish()
        return config


def _read_shape(read: FieldReader) -> dict[str, int]:
    """The size fields both architectures share."""
    hidden = read.integer("hidden_size")
    heads = read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", heads)
    read.require(
        heads % kv_heads == 0,
        f"`num_attention_heads` is {heads}, expected a multiple of `num_key_value_heads` = {kv_heads}",
    )
    head_dim = read.integer("head_dim", None)
    if head_dim is None:
        read.require(
            hidden % heads == 0, f"`hidden_size` is {hidden}, expected a multiple of `num_attention_heads` = {heads}"
        )
        head_dim = hidden // heads
    read.require(head_dim % 2 == 0, f"the head dimension is {head_dim}, expected an even number (RoPE turns pairs)")
    layers = read.integer("num_hidden_layers")
    read.require(layers <= MAX_LAYERS, f"`num_hidden_layers` is {layers}, expected at most {MAX_LAYERS}")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": read.integer("intermediate_size"),
        "vocab_size": read.integer("vocab_size"),
        "max_position_embeddings": read.integer(read.one_of(("max_position_embeddings", "max_seq_len"))),
    }


def _read_rope(read: FieldReader) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from `rope_theta` + `rope_scaling` or from Transformers 5's one `rope_parameters`."""
    theta = read.positive("rope_theta", None)
    section = read.section(read.one_of(("rope_parameters", "rope_scaling")))
    if section is None:
        return (10000.0 if theta is None else theta), None
    nested = FieldReader(section, "rope scaling")
    inner_theta = nested.positive("rope_theta", None)
    nested.require(
        theta is None or inner_theta is None or theta == inner_theta,
        f"`rope_theta` is {inner_theta} here and {theta} in the model's config",
    )
    kind = nested.choice(nested.one_of(("rope_type", "type")), ("default", "llama3"), "default")
    scaling = _read_llama3(nested) if kind == "llama3" else None
    nested.finish()
    return inner_theta or theta or 10000.0, scaling


def _read_llama3(read: FieldReader) -> RopeScaling:
    scaling = RopeScaling(
        factor=read.positive("factor"),
        low_freq_factor=read.positive("low_freq_factor"),
        high_freq_factor=read.positive("high_freq_factor"),
        original_context=read.integer("original_max_position_embeddings"),
    )
    read.require(
        scaling.high_freq_factor > scaling.low_freq_factor,
        f"`high_freq_factor` is {scaling.high_freq_factor}, expected more than `low_freq_factor` = "
        f"{scaling.low_freq_factor}",
    )
    return scaling


def _read_window(read: FieldReader, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The window length and the sorted layers it holds for, from either public spelling."""
    window = read.integer("sliding_window", None)
    listed = read.integers("swa_layers")
    count = read.integer("sliding_window_n_layers", None, minimum=-layers)
    unclamped = read.integers("unclamped_layers") or ()
    for name, indices in (("swa_layers", listed or ()), ("unclamped_layers", unclamped)):
        outside = [i for i in indices if not 0 <= i < layers]
        read.require(not outside, f"`{name}` lists layers {outside}, expected 0 to {layers - 1}")
    chosen = set(listed or ())
    if count is not None:
        read.require(count <= layers, f"`sliding_window_n_layers` is {count}, expected at most {layers}, the layers")
        counted = set(range(count) if count >= 0 else range(layers + count, layers)) - set(unclamped)
        read.require(
            listed is None or counted == chosen,
            f"`swa_layers` lists {sorted(chosen)} but `sliding_window_n_layers` means {sorted(counted)}",
        )
        chosen = counted
    clash = chosen & set(unclamped)
    read.require(not clash, f"layers {sorted(clash)} are in `swa_layers` and in `unclamped_layers`")
    read.require(not chosen or window is not None, "window layers are named but `sliding_window` is missing")
    return window, tuple(sorted(chosen))


def _read_lanes(read: FieldReader) -> dict[str, Any]:
    """Lane count, communication rule and head."""
    lanes = read.integer("num_lanes")
    single = lanes == 1
    delay = read.integer("broadcast_delay", *([0] if single else []), minimum=0)
    early = read.boolean("use_early_comm", *([False] if single or delay == 0 else []))
    both = read.boolean("use_comm", None)
    comm = {}
    for name in ("use_attention_comm", "use_mlp_comm"):
        own = read.boolean(name, None)
        read.require(
            both is None or own is None or own == both, f"`{name}` is {own} but `use_comm` is {both}, expected the same"
        )
        given = [value for value in (own, both) if value is not None]
        comm[name] = given[0] if given else True
    return {
        "num_lanes": lanes,
        "broadcast_delay": delay,
        "use_early_comm": early,
        **comm,
        "lm_head_type": read.choice("lm_head_type", HEAD_TYPES, *(["replicate"] if single else [])),
        "pre_norm_lane_agg": read.boolean("pre_norm_lane_agg", False),
    }


def _check_lanes(read: FieldReader, config: LaneformerConfig) -> None:
    """Every axis that is dealt to lanes must divide; heads must fit together."""
    lanes = config.num_lanes
    divided = ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
    if config.lm_head_type == "vocab_parallel":
        divided.append("vocab_size")
    for name in divided:
        value = getattr(config, name)
        read.require(value % lanes == 0, f"`{name}` is {value}, expected a multiple of `num_lanes` = {lanes}")
    replicate = config.lm_head_type == "replicate"
    read.require(
        replicate or not config.pre_norm_lane_agg,
        f"`pre_norm_lane_agg` needs `lm_head_type` replicate, not {config.lm_head_type}",
    )
    read.require(
        replicate or not config.tie_word_embeddings,
        f"`tie_word_embeddings` needs `lm_head_type` replicate, not {config.lm_head_type}",
    )
