"""An artifact is out of date when anything that made it has changed."""

from pathlib import Path

from kogc import build_key, targets


def test_device_code_of_every_target_counts():
    folder = Path(targets.__file__).parent
    suffixes = {file.suffix for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert suffixes <= set(build_key._SUFFIXES)
