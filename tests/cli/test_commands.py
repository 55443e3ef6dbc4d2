"""What the commands do when all is well."""

import json

import pytest

pytestmark = [pytest.mark.compiler, pytest.mark.zig]


def test_run_json_is_one_object_on_stdout(kogc, tiny_kog):
    done = kogc("run", tiny_kog, "--ids", "1,2,3", "--max-tokens", "5", "--json")
    assert done.code == 0 and done.out.count("\n") == 1
    result = json.loads(done.out)
    assert {"schema", "prompt_ids", "ids", "text", "finish_reason", "ttft_s", "decode_tok_s", "gate"} <= set(result)
    assert result["prompt_ids"] == [1, 2, 3] and len(result["ids"]) == 5 and result["finish_reason"] == "length"
    assert result["text"] is None, "no tokenizer, no text"
    assert result["gate"]["passed"] and result["decode_tok_s"] > 0
    assert " ".join(map(str, result["ids"])) in done.err, "the stream goes to stderr"


def test_run_streams_to_stdout_and_tells_the_speed_beside_the_gate(kogc, tiny_kog):
    done = kogc("run", tiny_kog, "--ids", "1,2,3", "--max-tokens", "9")
    assert done.code == 0 and len(done.out.split()) == 9
    assert "tok/s" in done.err and "gate passed" in done.err


def test_run_draws_tokens_and_reports_log_probabilities(kogc, tiny_kog):
    options = ("--ids", "1,2,3", "--max-tokens", "6", "--json", "--temperature", "1.2", "--top-p", "0.9", "--top-k", "30", "--min-p", "0.01")
    options += ("--repetition-penalty", "1.1", "--presence-penalty", "0.1", "--frequency-penalty", "0.1", "--ignore-eos")
    first, again = (json.loads(kogc("run", tiny_kog, *options, "--seed", "7", "--logprobs", "2").out) for _ in range(2))
    assert first["ids"] == again["ids"] and first["seed"] == 7 and len(first["logprobs"]) == 6
    assert [token["id"] for token in first["logprobs"]] == first["ids"]
    assert all(len(token["top"]) == 2 and token["logprob"] <= token["top"][0]["logprob"] + 1e-6 <= 1e-6 for token in first["logprobs"])
    unseeded = [json.loads(kogc("run", tiny_kog, *options).out) for _ in range(3)]
    assert len({tuple(one["ids"]) for one in unseeded}) > 1 and "logprobs" not in unseeded[0]
    assert json.loads(kogc("run", tiny_kog, "--ids", "1,2,3", "--json").out)["seed"] is None


def test_no_speed_without_a_gate(kogc, tiny_pt, tmp_path):
    path = tmp_path / "ungated.kog"
    assert kogc("compile", tiny_pt, "-o", path, "--no-gate", "--max-context", "32").code == 0
    done = kogc("run", path, "--ids", "1", "--max-tokens", "4", "--json")
    assert json.loads(done.out)["decode_tok_s"] is None and json.loads(done.out)["gate"] is None
    assert "tok/s" not in kogc("run", path, "--ids", "1", "--max-tokens", "4").err


def test_compile_again_does_nothing(kogc, tiny_pt, tiny_kog):
    before = tiny_kog.stat().st_mtime_ns, tiny_kog.stat().st_ino
    done = kogc("compile", tiny_pt, "-o", tiny_kog, "--workers", "2", "--json")
    assert done.code == 0 and json.loads(done.out)["cached"] is True
    assert (tiny_kog.stat().st_mtime_ns, tiny_kog.stat().st_ino) == before
    done = kogc("compile", tiny_pt, "-o", tiny_kog, "--workers", "1", "--json")
    assert json.loads(done.out)["cached"] is False and json.loads(done.out)["workers"] == 1


def test_several_ranks_are_shown_and_make_no_difference_to_who_runs_them(kogc, tiny_pt, tiny_kog, tmp_path):
    path = tmp_path / "ranks.kog"
    done = kogc("compile", tiny_pt, "-o", path, "--tp", "2", "--workers", "1")
    assert done.code == 0 and "2 ranks of 1 worker" in done.out and "gate passed" in done.out
    summary = kogc("inspect", path).out
    assert "2 ranks of 1 worker" in summary and "between ranks        6 exchanges a token" in summary
    facts = json.loads(kogc("inspect", path, "--json").out)
    assert (facts["ranks"], facts["workers"], facts["rank_exchanges_per_token"]) == (2, 1, 6)  # two a layer, the stream (53 words do not divide), the token
    assert json.loads(kogc("inspect", tiny_kog, "--json").out)["rank_exchanges_per_token"] == 0
    one, two = (json.loads(kogc("run", kog, "--ids", "1,2,3", "--max-tokens", "9", "--json").out) for kog in (tiny_kog, path))
    assert one["ids"] == two["ids"] and two["gate"]["passed"] and two["decode_tok_s"] > 0
    assert kogc("verify", path).code == 0 and kogc("verify", path, tiny_pt).code == 0 and kogc("verify", path, "--structure").code == 0


def test_dump_ir_writes_every_pass(kogc, tiny_pt, tmp_path):
    folder = tmp_path / "ir"
    assert kogc("compile", tiny_pt, "-o", tmp_path / "t.kog", "--dump-ir", folder).code == 0
    names = " ".join(sorted(path.name for path in folder.iterdir()))
    for word in ("trace", "decode", "partition", "stages", "program", "schedule", "kernel"):
        assert word in names, names


def test_inspect_shows_source_ir_program_summary_and_graph(kogc, tiny_kog, tmp_path):
    assert "stage_" in kogc("inspect", tiny_kog, "--source").out
    assert "rms_norm" in kogc("inspect", tiny_kog, "--ir").out
    assert json.loads(kogc("inspect", tiny_kog, "--program").out)["program"]["segments"]
    summary = kogc("inspect", tiny_kog, "--summary", "--bandwidth", "20").out
    for word in ("exchanges per layer", "bytes per token", "20"):
        assert word in summary, summary
    picture = tmp_path / "stages.svg"
    assert kogc("inspect", tiny_kog, "--graph", picture).code == 0
    assert picture.read_text().startswith("<svg")


def test_verify_against_model_and_against_its_own_ir(kogc, tiny_kog, tiny_pt):
    against_torch = kogc("verify", tiny_kog, tiny_pt)
    assert against_torch.code == 0 and "OFF" not in against_torch.out and "ok" in against_torch.out
    alone = kogc("verify", tiny_kog)
    assert alone.code == 0 and "IR" in alone.out
    assert kogc("verify", tiny_kog, "--structure").code == 0


def test_targets_and_doctor(kogc):
    assert "cpu" in kogc("targets").out
    done = kogc("doctor")
    assert done.code == 0 and "compiler" in done.out.lower()


@pytest.mark.parametrize("command", ["compile", "run", "inspect", "verify", "tune", "targets", "doctor", "demo"])
def test_help_shows_examples(kogc, command):
    done = kogc(command, "--help")
    assert done.code == 0 and f"kogc {command}" in done.out and "Example" in done.out


def test_help_lists_the_commands(kogc):
    out = kogc("--help").out
    assert all(name in out for name in ("compile", "run", "inspect", "verify", "tune", "targets", "doctor", "demo"))
