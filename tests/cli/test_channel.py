from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.run_blink import assert_one_line_failure, blink

NOBODY = "127.0.0.1:1"
COMMANDS = [("generate", "hello", "--address", NOBODY), ("top", "--once", "--http", NOBODY)]


@pytest.mark.parametrize("arguments", COMMANDS, ids=["generate", "top"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory"),
        ("sha256 = 'no certificate'\n", "it holds no certificates in PEM"),
        ("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "it holds no certificates in PEM"),
    ],
    ids=["missing", "no PEM", "a key"],
)
def test_an_authority_without_certificates_is_refused_by_name(
    tmp_path: Path, arguments: tuple[str, ...], content: str | None, why: str
) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    done = blink(*arguments, environment={"BLINK_TLS_AUTHORITY": str(path)})
    assert_one_line_failure(done, f"BLINK_TLS_AUTHORITY is {path}", why)
