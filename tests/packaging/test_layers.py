"""Who may import whom: cli → compiler, runtime → frontend, codegen → targets, templates, models → ir."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[2]
#: Folder → import name of what is in it.
TREES = {"kogc": "kogc", "ir": "kogc.ir", "models": "kogc.models", "targets": "kogc.targets", "templates": "kogc.templates"}

#: Height of every part. A module imports from its own part and from lower ones.
HEIGHT = {
    "kogc.ir": 0,
    "kogc.errors": 0,
    "kogc.cache": 1,
    "kogc.machine": 2,
    "kogc.models": 2,
    "kogc.templates": 2,
    "kogc.targets": 2,
    "kogc.codegen": 3,
    "kogc.frontend": 3,
    "kogc.artifact": 4,
    "kogc.artifact_container": 4,
    "kogc.artifact_hashes": 4,
    "kogc.artifact_manifest": 4,
    "kogc.artifact_writer": 4,
    "kogc.runtime": 4,
    "kogc": 5,  # compiler, gate, reports
    "kogc.cli": 6,
}


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in TREES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = file
    return found


MODULES = modules()


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of modules that run-time code of ``tree`` imports; what only type checkers see does not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: absolute imports only"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module
        yield from imported(node)


IMPORTS = {name: set(imported(ast.parse(file.read_text()))) for name, file in MODULES.items()}


def part_of(module: str) -> str:
    return max((part for part in HEIGHT if module == part or module.startswith(part + ".")), key=len)


@pytest.mark.parametrize("module", [m for m in MODULES if m != "kogc"])
def test_imports_point_downward(module):
    """``kogc`` itself is left out: it re-exports the top of the tree, lazily."""
    own = part_of(module)
    for name in IMPORTS[module]:
        if name.startswith("kogc.") or name == "kogc":
            other = part_of(name)
            assert other == own or HEIGHT[other] <= HEIGHT[own], f"{module} imports {name}"
            assert not (other == "kogc" and own == "kogc.ir"), f"{module} imports {name}"


def test_ir_knows_neither_torch_nor_jinja():
    for module, names in IMPORTS.items():
        if module.startswith("kogc.ir"):
            assert not {name.partition(".")[0] for name in names} & {"torch", "jinja2", "transformers"}, module
            assert all(name.startswith("kogc.ir") for name in names if name.startswith("kogc")), module


def test_no_circles():
    """Modules import each other in no circle, counting imports at the top of a file."""
    graph = nx.DiGraph()
    for name, file in MODULES.items():
        top = ast.parse(file.read_text())
        top.body = [node for node in top.body if isinstance(node, ast.Import | ast.ImportFrom)]
        graph.add_edges_from((name, other) for other in imported(top) if other in MODULES and other != name)
    assert list(nx.simple_cycles(graph)) == []


@pytest.mark.parametrize("code", ["import kogc.ir.program", "import kogc.runtime.engine", "import kogc.artifact"])
def test_running_needs_no_torch(code):
    """An artifact is opened and run without torch, so that a server starts fast and small."""
    check = f"import sys; {code}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd="/").returncode == 0
