"""kogc compiles a PyTorch decoder into one persistent, readable kernel per chip.

>>> import kogc
>>> artifact = kogc.compile("model.pt", target="cpu", output="model.kog")
>>> with kogc.load("model.kog").engine() as engine:
...     for token in engine.generate("def fib(n):", max_tokens=32): ...

The names below are imported on first use: `import kogc.ir` must not cost the import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kogc.artifact import Artifact as Artifact
    from kogc.artifact import load as load
    from kogc.compiler import compile as compile
    from kogc.errors import KogcError as KogcError
    from kogc.runtime.engine import Engine as Engine
    from kogc.runtime.sampling import SamplingParams as SamplingParams

_HOME = {
    "Artifact": "kogc.artifact",
    "Engine": "kogc.runtime.engine",
    "KogcError": "kogc.errors",
    "SamplingParams": "kogc.runtime.sampling",
    "compile": "kogc.compiler",
    "load": "kogc.artifact",
}

__all__ = ["Artifact", "Engine", "KogcError", "SamplingParams", "__version__", "compile", "load"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kogc' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
