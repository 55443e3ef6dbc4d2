"""Trains `checkpoints/pylane.pt`: a small Laneformer that writes Python, from Python's own standard library.

    python -m kogc.models.train_pylane --out models/checkpoints/pylane.pt

One thread, one seed, CPU only: the same machine and library versions give the same file.
"""

import argparse
import hashlib
import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from kogc.models.batch import batch_logits
from kogc.models.build import build_model
from kogc.models.laneformer import Laneformer

FILE_MARK = "<|file|>"
CONFIG = {
    "model_type": "laneformer_tp",
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "num_lanes": 4,
    "broadcast_delay": 1,
    "use_comm": True,
    "use_early_comm": True,
    "lm_head_type": "replicate",
    "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True,
    "tie_word_embeddings": False,
    "sliding_window": 64,
    "swa_layers": [0, 1, 2],
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Not written by hand for reading (tables, bundled wheels), or not under the library's own licence.
SKIPPED_FOLDERS = {
    "__pycache__", "_bundled", "encodings", "idlelib", "lib-dynload", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests", "turtledemo",
}  # fmt: skip
HELD_OUT_ONE_IN = 20
EVAL_EVERY = 100
EVAL_WINDOWS = 48


def read_library(root: Path) -> tuple[list[str], list[str]]:
    """The library's source files as (training, held-out) texts, in path order; one in 20 is held out by its name."""
    training, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(relative.as_posix().encode()).digest()
        (training if int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN else held_out).append(text)
    return training, held_out


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    """A byte-level BPE of `size` tokens; id 0 marks the start of a file. Decoding is lossless."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[FILE_MARK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts in one int64 vector, each after a file mark."""
    mark = tokenizer.token_to_id(FILE_MARK)
    ids = [i for encoding in tokenizer.encode_batch(texts) for i in (mark, *encoding.ids)]
    return torch.tensor(ids, dtype=torch.int64)


def initialise(model: Laneformer) -> None:
    """Small starting outputs: what a layer adds begins well below the embedding it is added to."""
    config = model.config
    depth = math.sqrt(2 * config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if name.endswith(("wo.weight", "w2.weight")):
            fan_in = parameter.shape[-1] * config.num_lanes
            torch.nn.init.normal_(parameter, std=0.5 * fan_in**-0.5 / depth)
        elif "tok_embeddings" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        elif name == "lm_head.weight":
            torch.nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def windows(ids: Tensor, length: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless random batches [batch, length + 1]: inputs and, shifted by one, targets."""
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(ids) - length - 1, (batch, 1), generator=generator)
        yield ids[starts + offsets]


def loss_of(model: Laneformer, batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token of `batch` [B, T + 1]."""
    logits = batch_logits(model, batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Laneformer, ids: Tensor, length: int, limit: int | None) -> float:
    """Nats per token over consecutive windows of `ids`, or over `limit` of them spread evenly."""
    starts = torch.arange(0, len(ids) - length - 1, length)
    if limit is not None:
        starts = starts[torch.linspace(0, len(starts) - 1, min(limit, len(starts))).long()]
    offsets = torch.arange(length + 1)
    losses = [loss_of(model, ids[part[:, None] + offsets]) * len(part) for part in starts.split(8)]
    return (sum(losses) / len(starts)).item()


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def make_optimizer(model: Laneformer) -> torch.optim.Optimizer:
    """AdamW that decays matrices but neither norms nor the embedding."""
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and "tok_embeddings" not in n]
    kept = [p for n, p in model.named_parameters() if p.dim() == 1 or "tok_embeddings" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def save(model: Laneformer, tokenizer: Tokenizer, path: Path) -> None:
    """Write the checkpoint in fp16 under a temporary name, then rename, so that readers never see half a file."""
    state = {name: tensor.detach().half() for name, tensor in model.state_dict().items()}
    temporary = path.with_suffix(".partial")
    torch.save({"config": CONFIG, "state_dict": state, "tokenizer": tokenizer.to_str()}, temporary)
    os.replace(temporary, path)


def train(
    model: Laneformer, training: Tensor, held_out: Tensor, options: argparse.Namespace, keep: Callable[[], None]
) -> None:
    """Run all steps; calls `keep()` whenever the sampled held-out loss is the best so far."""
    optimizer = make_optimizer(model)
    generator = torch.Generator().manual_seed(options.seed)
    length = CONFIG["max_position_embeddings"]
    best, started, losses = math.inf, time.monotonic(), []
    for step, batch in zip(range(options.steps), windows(training, length, options.batch, generator), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.peak)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % EVAL_EVERY == 0 or step + 1 == options.steps:
            held = held_out_loss(model, held_out, length, EVAL_WINDOWS)
            recent = sum(losses) / len(losses)
            minutes = (time.monotonic() - started) / 60
            print(f"step {step + 1} train {recent:.4f} held-out {held:.4f} minutes {minutes:.1f}", flush=True)
            losses.clear()
            if held < best:
                best = held
                keep()


def report(path: Path, held_out: Tensor, held_out_bytes: int) -> None:
    """Print the whole held-out loss of the saved fp16 weights, in nats per token and bits per byte."""
    checkpoint = torch.load(path, weights_only=True)
    model = build_model(checkpoint["config"], CONFIG["max_position_embeddings"])
    model.load_state_dict(checkpoint["state_dict"])
    nats = held_out_loss(model, held_out, CONFIG["max_position_embeddings"], None)
    bits = nats * len(held_out) / held_out_bytes / math.log(2)
    print(f"saved weights, all held-out text: {nats:.4f} nats per token, {bits:.4f} bits per byte")


def main(arguments: list[str] | None = None) -> None:
    """Read the library, train the tokenizer and the model, save the best checkpoint.

    `arguments` are the command line's; without them, the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint file to write")
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_path("stdlib")), help="source folder")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 256 tokens a step")
    parser.add_argument("--peak", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)

    training_texts, held_out_texts = read_library(options.library)
    tokenizer = train_tokenizer(training_texts, CONFIG["vocab_size"])
    training, held_out = encode(tokenizer, training_texts), encode(tokenizer, held_out_texts)
    held_out_bytes = sum(len(text.encode()) for text in held_out_texts)
    training_bytes = sum(len(text.encode()) for text in training_texts)
    print(f"training: {len(training_texts)} files, {training_bytes} bytes, {len(training)} tokens")
    print(f"held out: {len(held_out_texts)} files, {held_out_bytes} bytes, {len(held_out)} tokens")

    model = build_model(CONFIG, CONFIG["max_position_embeddings"])
    initialise(model)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    train(model, training, held_out, options, keep=lambda: save(model, tokenizer, options.out))
    report(options.out, held_out, held_out_bytes)


if __name__ == "__main__":
    # Here and not in `main`, because it holds for the whole process.
    torch.use_deterministic_algorithms(True)
    main()
