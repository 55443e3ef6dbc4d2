"""A stage profile as a picture: one bar a stage, waiting and work over a whole token. An SVG written by hand, as in ``ir.draw``."""

from __future__ import annotations

from html import escape

from kogc.stage_profile import StageProfile, StageTime, heading

_NAMES, _BAR, _VALUES, _PAD, _ROW, _HEIGHT = 270, 520, 210, 16, 26, 16
_COLOURS = {"embed": "#9dbf94", "matvec": "#7f9fd1", "attention": "#e0ad6b", "combine": "#d3938a", "rows": "#8fbcbc", "sample": "#b296c4"}
_INK, _QUIET, _WAIT = "#1f2933", "#52606d", "#d9dee3"
_TOP = 78


def picture(profile: StageProfile) -> str:
    """The text of an SVG file."""
    width, height = 2 * _PAD + _NAMES + _BAR + _VALUES, _TOP + _ROW * len(profile.stages) + 2 * _PAD
    scale = _BAR / max((stage.wait_token_us + stage.work_token_us for stage in profile.stages), default=1.0)
    parts = [_header(profile, width, height)]
    parts += [_bar(stage, _TOP + _ROW * row, scale) for row, stage in enumerate(profile.stages)]
    return "\n".join([*parts, "</svg>", ""])


def _bar(stage: StageTime, y: int, scale: float) -> str:
    x, text = _PAD + _NAMES, y + _HEIGHT - 4
    wait, work = stage.wait_token_us * scale, stage.work_token_us * scale
    times = f" × {stage.count}" if stage.count > 1 else ""
    label = f"{stage.wait_token_us:.1f} + {stage.work_token_us:.1f}"
    about = f"{stage.stage}: waits {stage.wait_us:.2f} µs, works {stage.work_us:.2f} µs (worker {stage.slowest}: {stage.slowest_us:.2f} µs)"
    return (
        f"<g><title>{escape(about)}</title>"
        f'<text x="{x - 8}" y="{text}" text-anchor="end">{escape(_clip(stage.stage))}{times}</text>'
        f'<rect x="{x}" y="{y}" width="{wait:.1f}" height="{_HEIGHT}" fill="{_WAIT}"/>'
        f'<rect x="{x + wait:.1f}" y="{y}" width="{work:.1f}" height="{_HEIGHT}" fill="{_COLOURS.get(stage.kind, _QUIET)}"/>'
        f'<text x="{x + wait + work + 6:.1f}" y="{text}" fill="{_QUIET}">{label}</text></g>'
    )


def _clip(name: str, width: int = 30) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"


def _header(profile: StageProfile, width: int, height: int) -> str:
    note = f"grey: waiting, coloured: work; µs of a token, the mean over workers; {profile.wait_us / profile.step_us:.0%} of the token is waiting"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11.5">'
        f"<style>text{{fill:{_INK}}}</style>"
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="{_PAD}" y="28" font-size="14" font-weight="bold">{escape(heading(profile))}</text>'
        f'<text x="{_PAD}" y="50" fill="{_QUIET}">{escape(note)}</text>'
    )
