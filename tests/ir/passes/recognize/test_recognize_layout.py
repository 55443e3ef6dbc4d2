"""The axis algebra against numpy: a chain of rearrangements leaves the layout that numpy's strides would show."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kogc.ir.passes.recognize.layout import Atom, Layout, LayoutError, cut, gaps, joined, layout_of, paired
from kogc.ir.passes.recognize.values import Space


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def rearranged(draw):
    """A layout and the same rearrangement of ``arange`` by numpy."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4)))
    layout, array = Layout.contiguous(shape), np.arange(np.prod(shape)).reshape(shape)
    for _ in range(draw(st.integers(0, 6))):
        step = draw(st.sampled_from(["split", "merge", "permute", "expand", "slice", "repeat", "select"]))
        axis = draw(st.integers(0, array.ndim - 1))
        old = list(array.shape)
        try:
            if step == "split":
                part = draw(st.sampled_from(divisors(old[axis])))
                new = (*old[:axis], part, old[axis] // part, *old[axis + 1 :])
                layout, array = layout.reshaped(new), array.reshape(new)
            elif step == "merge" and axis + 1 < array.ndim:
                new = (*old[:axis], old[axis] * old[axis + 1], *old[axis + 2 :])
                layout, array = layout.reshaped(new), array.reshape(new)
            elif step == "permute":
                order = draw(st.permutations(range(array.ndim)))
                layout, array = layout.permuted(order), array.transpose(order)
            elif step == "expand" and array.size < 2000:
                new = (2, *(3 if size == 1 else size for size in old))
                layout, array = layout.expanded(new), np.broadcast_to(array, new)
            elif step == "repeat" and array.size < 2000:
                layout, array = layout.repeated(axis, 2, inner=True), np.repeat(array, 2, axis)
            elif step == "select":
                place = draw(st.integers(0, old[axis] - 1))
                layout, array = layout.sliced(axis, place, 1), array[(slice(None),) * axis + (slice(place, place + 1),)]
            elif step == "slice":
                start = draw(st.integers(0, old[axis] - 1))
                count = draw(st.integers(1, old[axis] - start))
                layout, array = layout.sliced(axis, start, count), array[(slice(None),) * axis + (slice(start, start + count),)]
        except LayoutError:
            break  # not expressible; the layout is as before
        if array.ndim > 6:
            break
    return layout, array


@given(rearranged())
def test_layouts_follow_numpy(pair):
    layout, array = pair
    assert layout.shape == array.shape
    assert np.array_equal(layout.indices(), array)


@given(rearranged())
def test_layouts_are_found_from_indices(pair):
    layout, array = pair
    found = layout_of(array)
    assert found is not None and np.array_equal(found.indices(), array)


def test_view_after_view_is_no_trace():
    plain = Layout.contiguous((4, 48))
    heads = plain.reshaped((4, 6, 8)).permuted((1, 0, 2)).expanded((1, 6, 4, 8))
    assert heads.permuted((0, 2, 1, 3)).reshaped((4, 48)) == plain


def test_a_slice_of_pairs():
    odd = Layout.contiguous((6, 8)).reshaped((6, 4, 2)).sliced(2, 1, 1).reshaped((6, 4))
    assert odd == Layout(((Atom(8, 6),), (Atom(2, 4),)), 1)


def test_a_split_across_atoms_is_an_error():
    turned = Layout.contiguous((4, 6)).permuted((1, 0)).reshaped((24,))
    with pytest.raises(LayoutError, match="does not split"):
        turned.reshaped((3, 8)).reshaped((24,)).reshaped((8, 3)).reshaped((5, 5))
    with pytest.raises(LayoutError, match="does not split"):
        Layout(((Atom(10, 3), Atom(1, 5)),)).reshaped((5, 3))


def test_cut_joined_paired_gaps():
    assert joined([Atom(8, 2), Atom(1, 8), Atom(5, 1)]) == (Atom(1, 16),)
    assert cut((Atom(1, 16),), 4) == ((Atom(4, 4),), (Atom(1, 4),))
    assert paired((Atom(1, 12),), (Atom(100, 3), Atom(0, 4))) == [(Atom(4, 3), Atom(100, 3)), (Atom(1, 4), Atom(0, 4))]
    assert paired((), (Atom(3, 2),)) == [(Atom(0, 2), Atom(3, 2))]
    assert gaps([Atom(1, 4), Atom(16, 2)], 32) == (Atom(4, 4),)
    assert gaps([Atom(1, 4), Atom(2, 2)], 8) is None
    assert gaps([Atom(1, 4), Atom(4, 8)], 32) == ()


def test_space_tells_axes_apart():
    space = Space(tokens=4, lanes=2, features=6)
    assert space.by_axis(Atom(2, 24)) == [("T", Atom(12, 4)), ("L", Atom(6, 2)), ("F", Atom(2, 3))]
    moved = space.moved(Layout.contiguous((4, 12)), Space(4, 2, 9))
    assert moved == Layout(((Atom(18, 4),), (Atom(9, 2), Atom(1, 6))))
