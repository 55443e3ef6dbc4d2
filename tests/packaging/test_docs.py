"""Pages that are made by a program are current, and links between pages lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def program(name):
    """The program ``docs/<name>.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_walk_through_a_kernel_shows_what_is_emitted():
    walk = program("refresh_h200")
    assert walk.PAGE.read_text(encoding="utf-8") == walk.page(), "run: python docs/refresh_h200.py"


def test_the_ir_reference_is_current():
    generator = program("generate_ir_reference")
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run: python docs/generate_ir_reference.py"


def test_the_table_of_models_is_current():
    pytest.importorskip("transformers")
    generator = program("generate_models")
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run: python docs/generate_models.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)  # code is full of brackets
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'(?:src|href)="([^"#]+)"', text)
    dead = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not dead
