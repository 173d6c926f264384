"""How much of a stream may be unread."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daskinfer.worker.window import Window


@given(st.lists(st.integers(0, 200), max_size=40), st.data())
def test_no_more_is_unread_than_the_window_but_for_one_chunk(
    sizes: list[int], data: st.DataObject
) -> None:
    window, unread, read = Window(nbytes=100, chunks=3), list[int](), 0
    for size in sizes:
        while not window.admits(size):
            assert unread, "what nothing is unread of never waits"
            count = data.draw(st.integers(1, len(unread)))
            read += count
            del unread[:count]
            window.taken(read)
            # Said twice, or late, it changes nothing.
            window.taken(read - 1)
        window.send(size)
        unread.append(size)
        assert len(unread) <= 3
        assert len(unread) == 1 or sum(unread) <= 100


def test_it_counts_from_where_it_begins() -> None:
    window = Window(100, 1, first=5)
    window.send(10)
    window.taken(5)
    assert not window.admits(10)
    window.taken(6)
    assert window.admits(10)


def test_an_open_window_admits_everything() -> None:
    window = Window(1, 1)
    window.send(10)
    assert not window.admits(10)
    window.open()
    for _ in range(100):
        assert window.admits(10)
        window.send(10)
