from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.dpu_gateway.arena import Arena
from services.ring.schema import LINE_BYTES

SIZE = 64 * LINE_BYTES


@given(st.lists(st.one_of(st.integers(1, SIZE + 1), st.integers(-64, -1)), max_size=200))
def test_live_spans_never_overlap_and_every_byte_comes_back(steps: list[int]) -> None:
    arena = Arena(SIZE)
    live: list[tuple[int, int]] = []
    for step in steps:
        if step < 0:
            if live:
                arena.free(live.pop(step % len(live))[0])
            continue
        start = arena.allocate(step)
        if start is not None:
            assert start % LINE_BYTES == 0
            assert start + step <= SIZE
            assert all(start + step <= other or other + length <= start for other, length in live)
            live.append((start, step))
    for start, _ in live:
        arena.free(start)
    assert arena.free_bytes == SIZE
    assert arena.allocate(SIZE) == 0  # all merged back into one span


def test_a_request_that_fits_no_span_is_refused_although_enough_bytes_are_free_in_all() -> None:
    arena = Arena(4 * LINE_BYTES)
    spans = [arena.allocate(LINE_BYTES) for _ in range(4)]
    assert spans == [0, 64, 128, 192]
    arena.free(0)
    arena.free(128)
    assert arena.allocate(2 * LINE_BYTES) is None
    arena.free(64)
    assert arena.allocate(3 * LINE_BYTES) == 0


def test_next_fit_goes_on_behind_the_last_span_rather_than_refilling_the_first_gap() -> None:
    arena = Arena(4 * LINE_BYTES)
    assert arena.allocate(1) == 0
    assert arena.allocate(1) == 64
    arena.free(0)
    assert arena.allocate(1) == 128
    assert arena.allocate(1) == 192
    assert arena.allocate(1) == 0
