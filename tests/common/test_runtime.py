from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import BlinkError
from services.common.runtime import bootstrap_address, ring_path, runtime_directory


def test_the_directory_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_RUNTIME_DIR", str(tmp_path / "a/b"))
    assert runtime_directory().stat().st_mode & 0o777 == 0o700
    assert runtime_directory() == tmp_path / "a/b"


def test_the_sessions_directory_is_used_when_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLINK_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert bootstrap_address("x") == f"unix:{tmp_path}/blink/bootstrap-x.sock"


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("BLINK_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(BlinkError, match=r"not this user's alone"):
        runtime_directory()


def test_a_link_to_a_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("BLINK_RUNTIME_DIR", str(tmp_path / "link"))
    with pytest.raises(BlinkError, match=r"not this user's alone"):
        runtime_directory()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLINK_RUNTIME_DIR", str(tmp_path / "file/below"))
    with pytest.raises(BlinkError, match="file/below"):
        runtime_directory()


def test_instances_share_nothing() -> None:
    assert ring_path("a") != ring_path("b")
    assert bootstrap_address("a") != bootstrap_address("b")
