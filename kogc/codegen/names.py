"""Names and literals as C++ spells them."""

from __future__ import annotations

import re

import numpy as np

#: Words a generated name must not be: the language's, and what stage functions call their own.
_TAKEN = frozenset(
    """
    alignas auto await bool break case catch char class const constexpr continue default delete do double dot else enum
    explicit export extern false float for friend goto if inline int launch long mutable namespace new operator private
    protected public register return short signed sizeof static struct switch template this throw true try typedef
    typename union unsigned using virtual void volatile while
    activation batch count each exp here mine fma first i iteration lane last load other output part place position records row runs shared shares split
    storage store sum t table table_rows tanh token total unit units vec visit visits w window work Rows T NOTHING
    """.split()
)


def identifier(text: str) -> str:
    """``text`` with everything C++ cannot have in a name replaced by underscores."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "value"
    return f"n{name}" if name[0].isdigit() else name


class Scope:
    """Distinct C++ names of one function or file. ``name`` gives the same key the same name again."""

    def __init__(self, outer: Scope | None = None) -> None:
        """``outer``: the surrounding scope, none of whose present names is used again."""
        self._names: dict[str, str] = {}
        self._used = set(outer._used if outer else _TAKEN)

    def name(self, key: str, wish: str | None = None) -> str:
        """The name of ``key``, made from ``wish`` (or the key itself) when it has none yet."""
        if key not in self._names:
            base = name = identifier(wish or key)
            number = 2
            while name in self._used:
                name, number = f"{base}_{number}", number + 1
            self._used.add(name)
            self._names[key] = name
        return self._names[key]


def float_literal(value: float) -> str:
    """``value`` as the shortest C++ literal of the fp32 nearest to it. Raises ValueError when that is not finite."""
    with np.errstate(over="ignore"):
        nearest = np.float32(value)
    if not np.isfinite(nearest):
        raise ValueError(f"{value} is no fp32 constant")
    text = str(nearest)
    return text + ("f" if "." in text or "e" in text else ".0f")
