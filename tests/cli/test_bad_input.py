"""Bad input gets one clear line and exit code 2; nothing is written."""

import json
import os
import pickle
import zipfile

import pytest
import torch
from tiny_model import save_tiny
from torch import nn

pytestmark = pytest.mark.compiler


def refused(outcome, *words: str, code: int = 2) -> None:
    assert outcome.code == code, outcome
    for word in words:
        assert word in outcome.line, outcome.line


@pytest.fixture
def compile_bad(kogc, tmp_path):
    """Compiles what must be refused, and looks that nothing was left behind."""

    def run(model, *words, options=()):
        folder = tmp_path / "out"
        folder.mkdir(exist_ok=True)
        refused(kogc("compile", model, "-o", folder / "x.kog", *options), *words)
        assert not list(folder.iterdir())

    return run


def test_missing_file(compile_bad, tmp_path):
    compile_bad(tmp_path / "absent.pt", "absent.pt")


def test_empty_file(compile_bad, tmp_path):
    path = tmp_path / "empty.pt"
    path.touch()
    compile_bad(path, "empty")


def test_truncated_file(compile_bad, tiny_pt, tmp_path):
    path = tmp_path / "cut.pt"
    path.write_bytes(tiny_pt.read_bytes()[:-3000])
    compile_bad(path, "cut.pt")


def test_not_a_model(compile_bad, tmp_path):
    path = tmp_path / "text.pt"
    path.write_text("hello, this is no model at all\n" * 10)
    compile_bad(path, "text.pt")


def test_folder_without_config(compile_bad, tmp_path):
    (tmp_path / "folder").mkdir()
    compile_bad(tmp_path / "folder", "config.json")


def test_unknown_preset(compile_bad):
    compile_bad("preset:nothing", "nothing", "laneformer-2b")


def test_preset_without_weights(compile_bad):
    compile_bad("preset:llama-tiny", "--random-weights")


class Evil(nn.Module):
    pass


def test_pickled_module_is_refused_with_the_reason(compile_bad, tmp_path):
    path = tmp_path / "pickle.pt"
    torch.save(Evil(), path)
    compile_bad(path, "pickle", "--allow-pickle")


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_pickle_never_runs(compile_bad, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"config": {}, "state_dict": Bomb()}, "bomb.pt")
    compile_bad("bomb.pt", "pickle")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Bomb()))
    compile_bad("raw.pt", "raw.pt")
    assert not (tmp_path / "exploded").exists()


def test_missing_tensor_is_named(compile_bad, tmp_path):
    path = save_tiny(tmp_path / "m.pt", lambda config, tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    compile_bad(path, "model.layers.1.mlp.up_proj.weight")


def test_wrong_shape_names_expected_and_found(compile_bad, tmp_path):
    def spoil(config, tensors):
        tensors["model.norm.weight"] = torch.ones(25)

    compile_bad(save_tiny(tmp_path / "m.pt", spoil), "model.norm.weight", "[24]", "[25]")


def test_unexpected_tensor_is_named(compile_bad, tmp_path):
    path = save_tiny(tmp_path / "m.pt", lambda config, tensors: tensors.update(surplus=torch.ones(3)))
    compile_bad(path, "surplus")


def test_nan_weights_name_the_tensor(compile_bad, tmp_path):
    def spoil(config, tensors):
        tensors["model.layers.0.mlp.down_proj.weight"][3, 4] = float("nan")

    compile_bad(save_tiny(tmp_path / "m.pt", spoil), "model.layers.0.mlp.down_proj.weight", "NaN")


def test_fp16_overflow_names_the_tensor(compile_bad, tmp_path):
    def spoil(config, tensors):
        tensors["model.layers.0.mlp.down_proj.weight"][3, 4] = 1e6

    path = save_tiny(tmp_path / "m.pt", spoil)
    compile_bad(path, "model.layers.0.mlp.down_proj.weight", "fp16", options=("--dtype", "fp16", "--no-gate"))


def test_unknown_model_type(compile_bad, tmp_path):
    path = save_tiny(tmp_path / "m.pt", lambda config, tensors: config.update(model_type="t5"))
    compile_bad(path, "t5", "llama")


def test_unknown_field_is_not_ignored(compile_bad, tmp_path):
    path = save_tiny(tmp_path / "m.pt", lambda config, tensors: config.update(secret_gate=2))
    compile_bad(path, "secret_gate")


@pytest.mark.parametrize(
    "options",
    [("--dtype", "int8"), ("--workers", "0"), ("--workers", "many"), ("--max-context", "-3"), ("--target", "z80"), ("--frobnicate",)],
    ids=" ".join,
)
def test_bad_options(kogc, tiny_pt, tmp_path, options):
    done = kogc("compile", tiny_pt, "-o", tmp_path / "x.kog", *options)
    assert done.code == 2 and "Traceback" not in done.err and not (tmp_path / "x.kog").exists()


def test_ranks_that_do_not_divide_the_model(compile_bad, tiny_pt):
    compile_bad(tiny_pt, "3 ranks do not divide the 2 key/value heads", "1, 2 or 4 would", options=("--tp", "3"))
    compile_bad(tiny_pt, "8 ranks do not divide the 4 heads", options=("--tp", "8"))
    compile_bad(tiny_pt, "tp is 17", "from 1 to 16", options=("--tp", "17"))


def test_a_target_without_kernels_of_several_ranks_says_so(compile_bad, tiny_pt):
    compile_bad(tiny_pt, "tp is 2", "h200", options=("--tp", "2", "--target", "h200"))


def test_output_folder_is_absent_or_no_folder_or_read_only(kogc, tiny_pt, tmp_path):
    assert kogc("compile", tiny_pt, "-o", tmp_path / "no" / "x.kog").code in (1, 2)
    (tmp_path / "file").touch()
    assert kogc("compile", tiny_pt, "-o", tmp_path / "file" / "x.kog").code in (1, 2)
    refused(kogc("compile", tiny_pt, "-o", "/proc/x.kog"), "/proc", code=1)


def test_token_out_of_range(kogc, tiny_kog):
    refused(kogc("run", tiny_kog, "--ids", "1,53"), "53")
    refused(kogc("run", tiny_kog, "--ids", "1,-2"), "-2")
    refused(kogc("run", tiny_kog, "--ids", "1,two"), "two")


def test_empty_prompt(kogc, tiny_kog):
    refused(kogc("run", tiny_kog, "--ids", ""))


def test_prompt_without_tokenizer(kogc, tiny_kog):
    refused(kogc("run", tiny_kog, "--prompt", "hi"), "tokenizer", "--ids")


def test_prompt_and_ids_together(kogc, tiny_kog):
    refused(kogc("run", tiny_kog, "--prompt", "hi", "--ids", "1"), "--prompt", "--ids")


def test_context_overflow_tells_the_numbers(kogc, tiny_kog):
    refused(kogc("run", tiny_kog, "--ids", ",".join(["1"] * 65)), "65", "64")


def test_not_an_artifact(kogc, tiny_pt, tmp_path):
    for command in ("run", "inspect", "verify"):
        more = ("--ids", "1") if command == "run" else ()
        refused(kogc(command, tiny_pt, *more), "tiny.pt")
        refused(kogc(command, tmp_path / "absent.kog", *more), "absent.kog")
        assert kogc(command, tmp_path, *more).code == 2


def test_truncated_artifact(kogc, tiny_kog):
    tiny_kog.write_bytes(tiny_kog.read_bytes()[:-500])
    refused(kogc("run", tiny_kog, "--ids", "1"), "tiny.kog")


def test_flipped_byte_in_each_member_is_found_and_named(kogc, tiny_kog):
    whole = tiny_kog.read_bytes()
    members = {info.filename: (info.header_offset, info.file_size) for info in zipfile.ZipFile(tiny_kog).infolist()}
    assert len(members) >= 6
    for name, (offset, size) in members.items():
        start = whole.index(name.encode(), offset) + len(name)
        content = zipfile.ZipFile(tiny_kog).read(name)
        at = whole.index(content[:64], start) + size // 2
        tiny_kog.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        done = kogc("run", tiny_kog, "--ids", "1")
        assert done.code == 2, (name, done)
        assert "tiny.kog" in done.line and (name in done.line or name == "manifest.json"), (name, done.line)
        tiny_kog.write_bytes(whole)


def test_artifact_of_a_newer_schema(kogc, tiny_kog):
    whole = tiny_kog.read_bytes()
    manifest = json.loads(zipfile.ZipFile(tiny_kog).read("manifest.json"))
    old = json.dumps(manifest["schema"]).encode()
    key = whole.index(b'"schema"')
    at = whole.index(old, key + 8)
    tiny_kog.write_bytes(whole[:at] + b"9" + whole[at + 1 :])
    refused(kogc("run", tiny_kog, "--ids", "1"), "tiny.kog")


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_artifact_without_weights_says_so(kogc, tiny_pt, tmp_path, ranks):
    made = kogc("compile", tiny_pt, "-o", tmp_path / "bare.kog", "--no-weights", "--tp", ranks, "--workers", 1)
    assert made.code == 0 and "kogc run" not in made.out and "kogc inspect" in made.out
    for command in (("run", "--ids", "1"), ("verify",), ("export", "--onnx", tmp_path / "x.onnx")):
        refused(kogc(command[0], tmp_path / "bare.kog", *command[1:]), "it was compiled with --no-weights")
    assert not list(tmp_path.glob("*.onnx*"))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--temperature", "-1", "temperature must be a number at least 0"), ("--top-p", "1.5", "top_p must be a number above 0 and at most 1"),
        ("--top-k", "-3", "top_k must be from -1"), ("--min-p", "2", "min_p must be"), ("--logprobs", "99", "logprobs must be from 0 to 20"),
        ("--repetition-penalty", "0", "repetition_penalty must be a number above 0"), ("--seed", str(2**65), "seed must be from"),
        ("--temperature", "nan", "temperature must be"), ("--stop", "x", "no tokenizer"),
    ],
)  # fmt: skip
def test_bad_sampling_options(kogc, tiny_kog, option, value, words):
    refused(kogc("run", tiny_kog, "--ids", "1", option, value), words)
