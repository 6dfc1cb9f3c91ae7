"""What ``blink bench`` says on the way."""

from __future__ import annotations

import pytest

from services.cli.bench.command import narrator


def test_lines_come_whole_with_their_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    line = "no plots: pip install '.[bench]' in Blink's checkout, " + "and so on " * 20
    narrator()(line)
    assert capsys.readouterr().err.rstrip("\n") == line.rstrip("\n")
