from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.dpu_gateway.access.keys import KeyFile
from tests.cli.run_blink import assert_one_line_failure, blink, shown_key
from tests.dpu_gateway.harness import gateway
from tests.support.stand_in_engine import Behaviour

LIMITS = ["--requests-per-minute", "90", "--tokens-per-minute", "1234567", "--concurrent-requests", "4"]


def test_what_is_printed_is_a_key_file_that_knows_the_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    for name, flags in (("team-a", LIMITS), ("b", [])):
        done = blink("key", "new", name, *flags)
        assert done.returncode == 0, done.stderr
        key = shown_key(done.stderr)
        with path.open("a") as file:
            file.write(done.stdout)
        found = KeyFile(path).find(key)
        assert found is not None
        assert found.name == name
        limits = (found.requests_per_minute, found.tokens_per_minute, found.concurrent_requests)
        assert limits == ((90.0, 1_234_567.0, 4) if flags else (None, None, None))
        assert key not in path.read_text()


@pytest.mark.parametrize("name", ["a b", "", "x" * 65])
def test_a_name_that_no_file_could_hold_is_refused(name: str) -> None:
    assert_one_line_failure(blink("key", "new", name), "must be 1 to 64")


async def test_commands_send_the_key_of_the_environment(tmp_path: Path) -> None:
    made = blink("key", "new", "me")
    key = shown_key(made.stderr)
    (tmp_path / "keys.toml").write_text(made.stdout)
    async with gateway(Behaviour(), api_keys=tmp_path / "keys.toml") as system:
        address = f"unix:{system.directory / 'api-0.sock'}"
        arguments = ("generate", "abc", "--max-tokens", "3", "--address", address)
        done = await asyncio.to_thread(lambda: blink(*arguments, environment={"BLINK_API_KEY": key}))
        assert done.returncode == 0, done.stderr
        refused = await asyncio.to_thread(blink, *arguments)
        assert_one_line_failure(refused, "UNAUTHENTICATED", "API key is needed", "takes the key from BLINK_API_KEY")
