"""The picture shows every buffer at its place, and says so when it cannot be made."""

import sys
from pathlib import Path

import pytest

from megatron_memo.plan import picture
from megatron_memo.plan.errors import PictureError
from megatron_memo.plan.planner import make_plan
from megatron_memo.plan.records import Buffer

sys.path.insert(0, str(Path(__file__).parent))
from traces import transformer_step  # noqa: E402


def test_the_live_curve_steps_where_buffers_begin_and_end():
    buffers = [Buffer("a", 0, 4, 5), Buffer("b", 2, 6, 3), Buffer("c", 4, 5, 1)]
    assert picture.live_curve(buffers) == ([0, 2, 4, 5, 6], [5, 8, 4, 3, 0])


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PictureError, match="expected matplotlib; it is not installed. pip install matplotlib"):
        picture.require_library()


def test_layers_have_colours_in_the_order_of_their_numbers_and_the_step_is_grey():
    pytest.importorskip("matplotlib")
    colours = picture.layer_colours([Buffer(str(n), 0, 1, 1, layer) for n, layer in enumerate(["10/forward", "9/backward", "", "9/forward", "embedding"])])
    assert list(colours) == ["", "9", "10", "embedding"]
    assert len(set(colours.values())) == 4


@pytest.mark.parametrize("ending, magic", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_it_is_written_in_the_format_of_its_name(tmp_path, ending, magic):
    pytest.importorskip("matplotlib")
    buffers = transformer_step(3)
    path = tmp_path / f"plan.{ending}"
    picture.draw(str(path), buffers, make_plan(buffers), capacity_bytes=50_000)
    assert path.read_bytes().startswith(magic)


def test_each_buffer_is_one_rectangle_at_its_lifetime_and_addresses(tmp_path, monkeypatch):
    collections = pytest.importorskip("matplotlib.collections")
    seen = []

    class Spy(collections.PolyCollection):
        def __init__(self, rectangles, **style):
            seen.extend(rectangles)
            super().__init__(rectangles, **style)

    monkeypatch.setattr(collections, "PolyCollection", Spy)
    buffers = [Buffer("a", 0, 4, 2048), Buffer("b", 2, 6, 1024), Buffer("c", 4, 9, 2048)]
    plan = make_plan(buffers)
    picture.draw(str(tmp_path / "p.png"), buffers, plan)
    expected = [
        [(b.lower, o / 1024), (b.upper, o / 1024), (b.upper, (o + b.size_bytes) / 1024), (b.lower, (o + b.size_bytes) / 1024)]
        for b, o in zip(buffers, plan.offsets_bytes)
    ]
    assert seen == expected


def test_a_name_that_cannot_be_written_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    buffers = transformer_step(1)
    for name in ("no/p.png", "p.docx"):
        with pytest.raises(PictureError, match="cannot be written"):
            picture.draw(str(tmp_path / name), buffers, make_plan(buffers))
