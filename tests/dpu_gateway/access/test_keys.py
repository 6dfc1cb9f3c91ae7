from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from services.dpu_gateway.access import keys
from services.dpu_gateway.access.keys import KeyFile, KeyFileError, new_key


def entry(name: str, digest: str, *more: str) -> str:
    return "\n".join((f'["{name}"]', f'sha256 = "{digest}"', *more, ""))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_key_is_recognized_by_its_hash_and_no_other_is(path: Path) -> None:
    (first, first_hash), (second, second_hash) = new_key(), new_key()
    path.write_text(entry("a", first_hash, "requests_per_minute = 60") + entry("b.c", second_hash))
    file = KeyFile(path)
    found = file.find(first)
    assert found is not None
    assert (found.name, found.requests_per_minute, found.concurrent_requests) == ("a", 60.0, None)
    other = file.find(second)
    assert other is not None
    assert other.name == "b.c"
    for wrong in ("", first + "x", first[:-1], first_hash, "\udcff", "ключ"):
        assert file.find(wrong) is None


def test_keys_are_long_random_and_hashed() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    for key, digest in made:
        assert key.startswith("bk-")
        assert len(key) >= 40
        assert digest == hashlib.sha256(key.encode()).hexdigest()


def test_a_changed_file_is_taken_and_a_broken_one_leaves_the_keys_as_they_were(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "RELOAD_SECONDS", 0.0)
    (first, first_hash), (second, second_hash) = new_key(), new_key()
    path.write_text(entry("a", first_hash))
    file = KeyFile(path)

    def write(text: str, stamp: int) -> None:
        path.write_text(text)
        os.utime(path, (stamp, stamp))

    write(entry("b", second_hash), 1)
    assert file.find(first) is None
    assert file.find(second) is not None
    write("nonsense", 2)
    assert file.find(second) is not None
    path.unlink()
    assert file.find(second) is not None
    write(entry("a", first_hash), 3)
    assert file.find(second) is None
    assert file.find(first) is not None


SECRET = "bk-a-key-that-was-pasted-by-mistake"
HASH = "0" * 64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a", "keys.toml"),
        (entry("a", SECRET), "a.sha256"),
        (entry("a", HASH.upper().replace("0", "A")), "a.sha256"),
        (entry("a", HASH, "requests_per_minute = 0"), "a.requests_per_minute"),
        (entry("a", HASH, "requests_per_minute = inf"), "a.requests_per_minute"),
        (entry("a", HASH, "concurrent_requests = 1.5"), "a.concurrent_requests"),
        (entry("a", HASH, f'key = "{SECRET}"'), "a.key"),
        (entry("a b", HASH), "'a b'"),
        (entry("a", HASH) + entry("b", HASH), "b has the same sha256"),
        ("".join(entry(f"k{index}", f"{index:064x}") for index in range(1025)), "1025 keys, at most 1024"),
        ("a = 1", "a: "),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_shows_no_key(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    with pytest.raises(KeyFileError) as refusal:
        KeyFile(path)
    assert words in str(refusal.value)
    assert SECRET not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(KeyFileError, match="No such file"):
        KeyFile(path)
