"""The shipped checkpoint, and the script that made it."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import kogc.models
from kogc.models import train_pylane
from kogc.models.build import build_model, required_tensors

CHECKPOINT = Path(kogc.models.__file__).parent / "checkpoints" / "pylane.pt"
SNIPPET = '''
class Counter:
    """Counts how often each name is seen."""

    def __init__(self, names=None):
        self.counts = {}
        for name in names or ():
            self.add(name)

    def add(self, name):
        if not isinstance(name, str):
            raise TypeError("name must be a string")
        self.counts[name] = self.counts.get(name, 0) + 1
        return self.counts[name]
'''


@pytest.fixture(scope="module")
def checkpoint():
    return torch.load(CHECKPOINT, weights_only=True)


def test_file_is_small_and_complete(checkpoint):
    assert CHECKPOINT.stat().st_size <= 4_000_000
    assert set(checkpoint) == {"config", "state_dict", "tokenizer"}
    assert {t.dtype for t in checkpoint["state_dict"].values()} == {torch.float16}
    assert {n: tuple(t.shape) for n, t in checkpoint["state_dict"].items()} == required_tensors(checkpoint["config"])


def test_shows_what_laneformers_have(checkpoint):
    config = build_model(checkpoint["config"], 1).config
    assert config.num_lanes >= 4 and config.broadcast_delay >= 1
    assert 0 < len(config.window_layers) < config.num_hidden_layers
    assert config.sliding_window < config.max_position_embeddings


@pytest.mark.parametrize("text", [SNIPPET, "naïve — 漢字 🙂\r\n\t\x00  x", "", " leading"])
def test_tokenizer_is_lossless(checkpoint, text):
    tokenizer = Tokenizer.from_str(checkpoint["tokenizer"])
    assert tokenizer.get_vocab_size() == checkpoint["config"]["vocab_size"]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_byte_has_a_token(checkpoint):
    vocabulary = Tokenizer.from_str(checkpoint["tokenizer"]).get_vocab()
    assert sum(len(token) == 1 for token in vocabulary) == 256


def test_has_learned_python(checkpoint):
    """Unseen code costs less than 2.5 bits a byte; the tokenizer alone, with all tokens alike, gives more than 3.5."""
    tokenizer = Tokenizer.from_str(checkpoint["tokenizer"])
    ids = torch.tensor(tokenizer.encode(SNIPPET).ids)
    model = build_model(checkpoint["config"], len(ids))
    model.load_state_dict(checkpoint["state_dict"])
    with torch.no_grad():
        logits = model(ids[:-1], torch.arange(len(ids) - 1))
    bits = F.cross_entropy(logits, ids[1:], reduction="sum").item() / math.log(2)
    assert bits / len(SNIPPET.encode()) < 2.5


def test_training_twice_gives_the_same_checkpoint(tmp_path, capsys):
    library = tmp_path / "library"
    for i in range(40):
        file = library / f"part{i % 3}" / f"module{i}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SNIPPET.replace("Counter", f"Counter{i}"))
    made = []
    for name in ("a.pt", "b.pt"):
        path = tmp_path / name
        train_pylane.main(f"--out {path} --library {library} --steps 3 --batch 1 --seed 5".split())
        made.append(torch.load(path, weights_only=True))

    assert "bits per byte" in capsys.readouterr().out
    assert made[0]["tokenizer"] == made[1]["tokenizer"]
    for name, tensor in made[0]["state_dict"].items():
        assert torch.equal(tensor, made[1]["state_dict"][name]), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "b.pt", "library"]


def test_library_reader_leaves_out_tests_tables_and_foreign_packages(tmp_path):
    for name in ("a.py", "test/b.py", "site-packages/c.py", "encodings/d.py", "json/e.py", "f.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(name)
    (tmp_path / "latin.py").write_bytes(b"# \xff")
    training, held_out = train_pylane.read_library(tmp_path)
    assert sorted(training + held_out) == ["a.py", "json/e.py"]


def test_learning_rate_rises_then_falls():
    rates = [train_pylane.learning_rate(step, 1000, 1.0) for step in range(1000)]
    assert rates.index(max(rates)) in (99, 100)
    assert rates[0] == pytest.approx(0.01)
    assert rates[-1] == pytest.approx(0.02, abs=1e-3)
