"""Models of the Hugging Face hub: what is an id, what is fetched, and what goes wrong."""

import json

import pytest

from kogc.explain import explain
from kogc.frontend.errors import FrontendError
from kogc.frontend.hub import is_hub_id
from kogc.frontend.load import load_model
from kogc.models.presets import PRESETS


@pytest.fixture
def hub(monkeypatch):
    """The calls of ``snapshot_download``; ``answer`` is the folder it gives, or the error it raises."""
    import huggingface_hub

    class Hub:
        answer: object = None
        calls: list = []

    def download(name, **options):
        Hub.calls.append((name, options))
        if isinstance(Hub.answer, Exception):
            raise Hub.answer
        return str(Hub.answer)

    Hub.calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return Hub


def test_an_id_is_fetched_without_code_and_named_after_the_model(hub, tmp_path):
    (tmp_path / "0123abcd").mkdir()
    (tmp_path / "0123abcd" / "config.json").write_text(json.dumps(PRESETS["llama-tiny"]))
    hub.answer = tmp_path / "0123abcd"
    model = load_model("somebody/Tiny-Llama")
    assert model.name == "Tiny-Llama"
    assert hub.calls == [("somebody/Tiny-Llama", {"allow_patterns": ["*.json", "*.safetensors", "*.jinja"]})]


def test_code_is_fetched_where_it_is_trusted(hub, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["llama-tiny"]))
    hub.answer = tmp_path
    load_model("somebody/Tiny-Llama", trust_remote_code=True)
    assert hub.calls == [("somebody/Tiny-Llama", {"allow_patterns": ["*.json", "*.safetensors", "*.jinja", "*.py"]})]


def test_without_weights_only_the_shape_is_fetched(hub, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["llama-tiny"]))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "absent.safetensors"}}))
    hub.answer = tmp_path
    assert explain("somebody/Tiny-Llama").supported
    assert hub.calls == [("somebody/Tiny-Llama", {"allow_patterns": ["*.json", "*.jinja"]})]


def test_what_cannot_be_had_is_one_line(hub):
    hub.answer = RuntimeError("404 Client Error\n\nRepository Not Found")
    with pytest.raises(FrontendError, match="somebody/absent is nothing here, and cannot be had from the Hugging Face hub: 404"):
        load_model("somebody/absent")


def test_files_and_folders_are_no_ids(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_hub_id("meta-llama/Llama-3.1-8B")
    for path in ("models/tiny", "absent/model.pt", "./a/b", "/a/b", "a/b/c", "model", "preset:x", "../a/b"):
        assert not is_hub_id(path), path
    with pytest.raises(FrontendError, match="cannot be read"):
        load_model("models/absent")
    assert hub.calls == []
