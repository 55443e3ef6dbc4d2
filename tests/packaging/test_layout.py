"""What pyproject says about the tree is true."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = {name: ROOT / folder for name, folder in SETUPTOOLS["package-dir"].items()}


def package_folder(package: str) -> Path:
    """The folder of a package: that of its longest mapped prefix, and the rest of its name below it."""
    prefix = max((p for p in FOLDERS if package == p or package.startswith(p + ".")), key=len)
    return FOLDERS[prefix].joinpath(*package[len(prefix) :].strip(".").split("."))


def packages_on_disk() -> set[str]:
    found = set()
    for prefix, folder in FOLDERS.items():
        for init in folder.rglob("__init__.py"):
            found.add(".".join((prefix, *init.parent.relative_to(folder).parts)))
    return found


def test_every_package_folder_is_listed():
    assert packages_on_disk() == set(SETUPTOOLS["packages"])


def test_every_python_file_is_in_a_listed_package():
    folders = {package_folder(package).resolve() for package in SETUPTOOLS["packages"]}
    for top in FOLDERS.values():
        stray = [file for file in top.rglob("*.py") if file.parent.resolve() not in folders]
        assert not stray, f"no __init__.py beside {stray}"


@pytest.mark.parametrize("package", FOLDERS)
def test_every_data_file_is_shipped(package):
    """Files that are not Python must match a package-data pattern, or a wheel would lack them."""
    folder, patterns = FOLDERS[package], SETUPTOOLS["package-data"].get(package, [])
    shipped = {file for pattern in patterns for file in folder.glob(pattern)}
    data = {
        file
        for file in folder.rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc") and not any(part in ("__pycache__", ".mypy_cache") for part in file.parts)
    }
    assert data - shipped == set()


def test_the_list_is_sorted():
    assert SETUPTOOLS["packages"] == sorted(SETUPTOOLS["packages"])


def test_source_files_stay_small():
    """A file is one idea; past 450 lines it is two."""
    long = {
        str(file.relative_to(ROOT)): lines
        for top in FOLDERS.values()
        for file in top.rglob("*")
        if file.suffix in (".py", ".j2", ".h", ".cpp") and (lines := file.read_text().count("\n")) > 450
    }
    assert not long
