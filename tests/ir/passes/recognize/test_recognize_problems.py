"""All problems of a graph at once, layer by layer, and none where there is none."""

import torch
from decoder_styles import HIDDEN, Decoder, HuggingFace, decoder
from torch import nn

from kogc.frontend.trace import trace
from kogc.ir.passes.recognize import find_problems


class Router(nn.Module):
    """An MLP that chooses features: a problem in every layer, and what is made of it is none of its own."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return torch.softmax(self.up(x), -1).sort(-1).values * 2.0


class Exotic(Decoder):
    attention, mlp, layers = HuggingFace, Router, 3

    def forward(self, token, position):
        return torch.cumsum(super().forward(token, position), -1)


def test_every_layer_is_looked_at_and_what_follows_a_problem_is_not_one():
    problems = find_problems(trace(Exotic()))
    assert [problem.node.op for problem in problems] == ["aten.softmax"] * 3 + ["aten.cumsum"]
    assert [problem.node.module for problem in problems] == ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp", ""]
    assert all("test_recognize_problems.py:" in str(problem) for problem in problems)


def test_a_model_that_is_recognised_has_none():
    assert find_problems(trace(decoder(HuggingFace))) == []
