"""``preset:NAME``: a known shape without weights, or with random ones."""

from __future__ import annotations

import difflib
import json

from kogc.frontend.errors import FrontendError
from kogc.frontend.model_input import ModelInput, digest, ending_ids, reference_module, starting_id
from kogc.frontend.sources import MissingWeights, RandomWeights
from kogc.models.presets import PRESETS

PREFIX = "preset:"


def load_preset(name: str, *, random_weights: bool = False, seed: int = 0, max_context: int | None = None) -> ModelInput:
    """The preset ``name`` (without prefix). Weights are absent, or seeded random fp16 values.

    Raises:
        FrontendError: no such preset.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise FrontendError(f"there is no preset {name!r}; {hint}known: {', '.join(PRESETS)}")
    config, where = PRESETS[name], PREFIX + name
    module, context, shapes = reference_module(config, where, max_context)
    return ModelInput(
        name=name,
        module=module,
        weights=RandomWeights(shapes, "fp16", seed) if random_weights else MissingWeights(shapes, where),
        config=config,
        tokenizer_json=None,
        chat_template=None,
        eos_ids=ending_ids(config, where),
        bos_id=starting_id(config, where),
        context=context,
        identity=digest(where, json.dumps(config, sort_keys=True), f"random {seed}" if random_weights else "none"),
        dtype="fp16",
    )
