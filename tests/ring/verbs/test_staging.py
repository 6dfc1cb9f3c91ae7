from __future__ import annotations

from services.ring.verbs.staging import Circle


def test_pieces_are_whole_and_never_overlap_one_that_is_not_freed() -> None:
    circle = Circle(start=100, size=1000)
    live: list[tuple[int, int, int]] = []  # start, length, count once it is freed
    for turn in range(500):
        length = (turn * 37) % 400 + 1
        start = circle.take(length)
        while circle.overfull:
            circle.freed = live.pop(0)[2]
        assert 100 <= start <= 1100 - length
        assert all(start + length <= other or other + size <= start for other, size, _ in live)
        live.append((start, length, circle.taken))
    assert len(live) > 1
