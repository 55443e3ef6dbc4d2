"""The stage graph as SVG."""

import xml.etree.ElementTree as ElementTree

import pytest
from tiny_model import save_tiny

from kogc.compile_passes import plan
from kogc.dump import Dump
from kogc.frontend.load import load_model
from kogc.ir.draw import draw, stage_edges
from kogc.targets import load_target


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    model = load_model(save_tiny(tmp_path_factory.mktemp("draw") / "tiny.pt"))
    return plan(model, "fp32", 2, load_target("cpu"), Dump(None), lambda *_: None).program


def test_every_stage_and_every_loop_is_in_the_picture(program):
    text = "\n".join(ElementTree.fromstring(draw(program)).itertext())
    for segment in program.segments:
        assert segment.name in text
        for stage in segment.stages:
            assert stage.title[:40] in text


def test_values_flow_from_their_writer(program):
    stages = [stage for segment in program.segments for stage in segment.stages]
    for edge in stage_edges(program):
        assert edge.buffer in {operand.buffer for operand in stages[edge.reader].operands}
        assert edge.age or edge.writer < edge.reader
