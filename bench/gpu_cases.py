"""What is measured on a GPU and what is asked of it (issue 3's table)."""

from __future__ import annotations

from dataclasses import dataclass

from kogc.models.presets import PRESETS

#: Positions behind the last context that is measured, for the tokens around it.
ROOM = 256


@dataclass(frozen=True)
class Asked:
    """A context position to decode at, and the share of the read ceiling (%) that is required there."""

    context: int
    share: float | None = None


@dataclass(frozen=True)
class Case:
    """A preset with random weights. ``ratio``: required speed in multiples of torch.compile's at the first context;
    ``tok_s``: required tokens a second there."""

    preset: str
    dtype: str
    asked: tuple[Asked, ...]
    ratio: float | None = None
    tok_s: float | None = None

    @property
    def capacity(self) -> int:
        """Positions to compile for."""
        wanted = max(asked.context for asked in self.asked) + ROOM
        return min(wanted, PRESETS[self.preset]["max_position_embeddings"])


#: The most important first: a run that is cut off has told of these.
CASES = (
    Case("laneformer-2b", "fp16", (Asked(1024, 97.5),), 1.75),
    Case("llama-2.3b", "fp16", (Asked(1024, 93.5), Asked(16384, 93.0)), 1.75),
    Case("llama-3.2-1b", "bf16", (Asked(1024, 92.0),), 1.75),
    Case("llama-3.1-8b", "bf16", (Asked(1024, 95.5),), 1.25),
    Case("smollm2-135m", "fp16", (Asked(1024),), tok_s=3500),
)


def chosen_cases(only: list[str], context: int | None) -> list[Case]:
    """The cases named in ``only`` (all without names) in their order; other presets are measured without requirements.
    ``context`` replaces the contexts and their requirements. Raises KeyError for a name that is no preset."""
    known = {case.preset: case for case in CASES}
    cases = [known.get(name) or _free_case(name) for name in only] if only else list(CASES)
    if context is None:
        return cases
    return [Case(case.preset, case.dtype, (Asked(context),)) for case in cases]


def _free_case(name: str) -> Case:
    if name not in PRESETS:
        raise KeyError(f"there is no preset {name}; known: {', '.join(PRESETS)}")
    return Case(name, "fp16", (Asked(PRESETS[name]["max_position_embeddings"] // 2 if name.endswith("tiny") else 1024),))
