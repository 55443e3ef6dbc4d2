"""Writes docs/models.md from the shapes that tests/families holds against Transformers: python docs/generate_models.py"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers

from kogc.frontend.transformers_build import build
from kogc.frontend.transformers_step import cache_shapes

PAGE = Path(__file__).with_name("models.md")
_SHAPES = Path(__file__).parents[1] / "tests" / "families" / "shapes.py"

INTRO = """\
# Models

Generated from the shapes in `tests/families/shapes.py` by `python docs/generate_models.py`; a test holds that it is current.

kogc knows no model by name. A Hugging Face folder whose `model_type` is not one of kogc's own (Laneformer, Llama) is built by
[Transformers](https://github.com/huggingface/transformers) (`pip install 'kogc[hf]'`), traced as one decode step over static caches and
recognised by what the graph computes; the rows for Llama below take this way, too. So a family that is missing here may work all the same; if it does not, the error names
the operation and the line of the model's code.

A folder may bring its model's code along (`auto_map` in its `config.json`). It runs only with `--trust-remote-code`, and kogc says so;
without that a Laneformer or Llama is read with kogc's own module, and anything else that Transformers does not know is refused.

Every row is a test: a small random model of that shape, exported, compiled for `cpu` in fp32 and held against the logits of
Transformers over 32 teacher-forced positions (relative RMSE ≤ 1e-4, argmax equal wherever the margin is clear), then generating
greedily.
"""

MORE = """\
## And without being asked for

These came along with the rules for the others; they are tested by `pytest -m full tests/families`.
"""

REFUSED = """\
## Not recognised yet

| family | what | op | the error |
|---|---|---|---|
"""

OUTSIDE = """\
## Outside

Each of these is one line and exit code 2: encoder-decoders, models without a causal language model (a vision encoder), mixtures of
experts, and operations that no rule knows. `kogc explain MODEL` says the same without weights, layer by layer.
"""


def page() -> str:
    """The whole page."""
    shapes = _shapes()
    return "\n".join([INTRO, _passing(shapes.SHAPES), MORE, _passing(shapes.MORE), REFUSED + _refused(shapes.REFUSED), OUTSIDE])


def _shapes():
    spec = importlib.util.spec_from_file_location("family_shapes", _SHAPES)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks its annotations up
    spec.loader.exec_module(module)
    return module


def _passing(shapes: Iterable) -> str:
    lines = ["| family | what | layers | query / key-value heads | head size | |", "|---|---|---|---|---|---|"]
    for shape in shapes:
        config = getattr(transformers, shape.config)(**shape.fields)
        heads = config.num_attention_heads
        groups, size = _cached_heads(config)
        lines.append(f"| {shape.family} | {shape.what} | {config.num_hidden_layers} | {heads} / {groups} | {size} | passes |")
    return "\n".join(lines) + "\n"


def _cached_heads(config) -> tuple[int, int]:
    """Key/value heads and their size, as the model caches them."""
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        (keys, _), *_ = cache_shapes(build(Path(folder)), 1, folder)
    return keys[1], keys[3]


def _refused(shapes: Iterable) -> str:
    return "".join(f"| {shape.family} | {shape.what} | `{shape.refused[0]}` | {shape.refused[1]} |\n" for shape in shapes)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
