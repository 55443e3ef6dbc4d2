"""Pages that are made by a program are current, and links between pages lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_ir_reference_is_current():
    spec = importlib.util.spec_from_file_location("generate_ir_reference", ROOT / "docs" / "generate_ir_reference.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run: python docs/generate_ir_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'(?:src|href)="([^"#]+)"', text)
    dead = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not dead
