"""How gates and speeds are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def gate_json(gate: Any) -> Mapping[str, Any] | None:
    """A gate's results as JSON values, ``None`` where it did not run. Takes a GateResult or what a manifest holds."""
    return gate.to_json() if hasattr(gate, "to_json") else gate


def gate_line(gate: Any, note: str | None = None) -> str:
    """One line: passed or not, against what, how far off."""
    values = gate_json(gate)
    if values is None:
        return f"accuracy gate: not run ({note})" if note else "accuracy gate: not run"
    word = "passed" if values["passed"] else "FAILED"
    share = values["argmax_checked"] / values["positions"]
    line = (
        f"accuracy gate {word}: {values['positions']} positions against {values['reference']}, relative RMSE "
        f"{values['rel_rmse']:.1e} (limit {values['limit']:.0e}), same next token at all {values['argmax_checked']} positions "
        f"with a clear margin ({share:.0%}), {values['runs']} runs bit-identical"
    )
    return line if values["passed"] else f"accuracy gate {word}: {values['problem']}"
