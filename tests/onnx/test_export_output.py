"""Where `kogc export` writes: whole files or none, and never over something that is no earlier export."""

from pathlib import Path

import onnx
import pytest
from against_torch import random_model

from kogc.errors import BadInput, OutputFailure
from kogc.export import export_onnx
from kogc.models.presets import PRESETS
from kogc.onnx.store import TensorStore

#: Its embedding does not fit into the model file.
CONFIG = {**PRESETS["llama-tiny"], "vocab_size": 128, "hidden_size": 64, "head_dim": 16}


@pytest.fixture
def exported(tmp_path) -> Path:
    export_onnx(random_model(CONFIG, 8), tmp_path / "x.onnx")
    return tmp_path / "x.onnx"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_earlier_export_is_replaced_and_nothing_else_is_left(exported, tmp_path):
    before = contents(tmp_path)
    assert before.keys() == {"x.onnx", "x.onnx.data"}
    export_onnx(random_model({**CONFIG, "vocab_size": 200}, 8), exported)
    after = contents(tmp_path)
    assert after.keys() == before.keys() and all(after[name] != before[name] for name in before)
    onnx.checker.check_model(exported, full_check=True)


@pytest.mark.parametrize("error, raised", [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), OutputFailure)])
def test_what_ends_in_the_middle_leaves_all_as_it_was(error, raised, exported, tmp_path, monkeypatch):
    before, add, added = contents(tmp_path), TensorStore.add, []

    def add_three(self, name, value):
        if len(added) == 3:
            assert any(path.suffix == ".part" for path in tmp_path.iterdir())
            raise error
        added.append(name)
        return add(self, name, value)

    monkeypatch.setattr(TensorStore, "add", add_three)
    with pytest.raises(raised):
        export_onnx(random_model(CONFIG, 8), exported)
    assert contents(tmp_path) == before


def test_what_must_not_be_replaced(exported, tmp_path):
    module = random_model(CONFIG, 8)
    weights = tmp_path / "model.pt"
    weights.write_bytes(b"a checkpoint")
    for path, error, says in (
        (weights, BadInput, "is no .onnx file; choose another name with --onnx"),
        (Path(""), OutputFailure, "it is a folder"),
        (Path("/dev/null"), OutputFailure, "it is a device or a pipe"),
        (tmp_path / "absent" / "x.onnx", OutputFailure, "there is no folder .*absent"),
    ):
        with pytest.raises(error, match=says):
            export_onnx(module, path)
    with pytest.raises(BadInput, match="it is the model itself"):
        export_onnx(exported, exported)
    assert weights.read_bytes() == b"a checkpoint"


def test_the_large_tensors_of_another_model_stay(exported, tmp_path):
    """A renamed model still reads the file beside it that has its old name."""
    renamed = exported.rename(tmp_path / "renamed.onnx")
    before = contents(tmp_path)
    with pytest.raises(BadInput, match="x.onnx.data, which is there without it"):
        export_onnx(renamed, exported)
    assert contents(tmp_path) == before
