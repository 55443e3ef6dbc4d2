"""Reading a model configuration dict: every field is taken once, checked, and nothing is left over unnoticed."""

import math
from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration has a missing, unknown or inconsistent field; the message names it."""


# Written by Hugging Face tools beside the architecture; none of these changes the logits of one forward pass.
IGNORED_FIELDS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout
    auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cls_token_id
    decoder_start_token_id diversity_penalty do_sample dropout dtype early_stopping encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label initializer_range is_decoder is_llama_config label2id length_penalty max_length min_length
    model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values repetition_penalty resid_dropout return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unk_token_id use_bfloat16 use_cache use_return_dict
    """.split()
)

# Understood, but only in the one form the reference models implement.
FIXED_FIELDS: dict[str, Any] = {
    "hidden_act": "silu",
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
}

_REQUIRED = object()


class FieldReader:
    """Takes typed fields out of a configuration dict and reports what nobody took.

    A value of None (JSON null) counts as absent. All errors are `ConfigError`.
    """

    def __init__(self, values: Mapping[str, Any], what: str):
        self._what = what
        self._values = {
            name: value for name, value in values.items() if name not in IGNORED_FIELDS and value is not None
        }
        for name, expected in FIXED_FIELDS.items():
            if name in self._values and self._values[name] != expected:
                self.fail(f"`{name}` is {self._values[name]!r}, only {expected!r} is supported")
            self._values.pop(name, None)

    def fail(self, message: str) -> None:
        """Raise `ConfigError` with `message` after the name of the configuration."""
        raise ConfigError(f"{self._what} config: {message}")

    def require(self, condition: bool, message: str) -> None:
        """Raise `ConfigError` unless `condition` holds."""
        if not condition:
            self.fail(message)

    def integer(self, name: str, default: Any = _REQUIRED, minimum: int = 1) -> Any:
        """An int of at least `minimum`."""
        return self._take(
            name, default, lambda v: type(v) is int and v >= minimum, f"an integer of at least {minimum}"
        )

    def positive(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite number above zero, as a float."""
        value = self._take(
            name, default, lambda v: type(v) in (int, float) and 0 < v < math.inf, "a finite number above 0"
        )
        return None if value is None else float(value)

    def boolean(self, name: str, default: Any = _REQUIRED) -> Any:
        """True or False."""
        return self._take(name, default, lambda v: isinstance(v, bool), "true or false")

    def choice(self, name: str, choices: tuple[str, ...], default: Any = _REQUIRED) -> Any:
        """One of the strings in `choices`."""
        return self._take(name, default, lambda v: v in choices, f"one of {', '.join(choices)}")

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of ints as a tuple, or None when absent."""
        value = self._take(
            name,
            None,
            lambda v: isinstance(v, list | tuple) and all(type(i) is int for i in v),
            "a list of integers",
        )
        return None if value is None else tuple(value)

    def section(self, name: str) -> dict[str, Any] | None:
        """A nested dict, or None when absent."""
        value = self._take(name, None, lambda v: isinstance(v, Mapping), "a mapping")
        return None if value is None else dict(value)

    def one_of(self, names: tuple[str, ...]) -> str:
        """The name among synonyms that is present (the first when none is); two that disagree are an error."""
        present = [name for name in names if name in self._values]
        for other in present[1:]:
            first, second = self._values[present[0]], self._values[other]
            self.require(first == second, f"`{present[0]}` is {first!r} but `{other}` is {second!r}")
            del self._values[other]
        return present[0] if present else names[0]

    def finish(self) -> None:
        """Raise `ConfigError` naming every field that was present and not taken."""
        if self._values:
            names = ", ".join(f"`{name}` = {value!r}" for name, value in sorted(self._values.items()))
            self.fail(f"not understood: {names}")

    def _take(self, name: str, default: Any, valid: Any, expected: str) -> Any:
        if name not in self._values:
            if default is _REQUIRED:
                self.fail(f"`{name}` is missing, expected {expected}")
            return default
        value = self._values.pop(name)
        self.require(valid(value), f"`{name}` is {value!r}, expected {expected}")
        return value
