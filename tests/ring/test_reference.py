"""docs/ring.md says what schema.py says."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.ring import reference, schema

PAGE = Path(__file__).parents[2] / "docs" / "ring.md"


def test_the_page_is_current() -> None:
    page = PAGE.read_text()
    assert reference.refresh(page) == page, "run python -m services.ring.reference"


def test_a_changed_field_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text()
    monkeypatch.setattr(schema, "STRUCTS", schema.STRUCTS[1:])
    assert reference.refresh(page) != page


def test_a_page_without_the_generated_part_is_refused() -> None:
    with pytest.raises(ValueError, match="once each"):
        reference.refresh("# Ring")
