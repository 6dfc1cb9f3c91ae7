"""Starting, stopping, and leaving nothing behind."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from services.common.runtime import ring_path
from tests.e2e.conftest import Launch
from tests.e2e.product import Stream, request, until
from tests.gpu_engine.models.tiny import random_weights, tiny_config, write_hugging_face


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_lets_open_streams_finish_and_leaves_nothing(launch: Launch, number: signal.Signals) -> None:
    product = launch("--workers", "2")
    with product.channel() as channel:
        stream = Stream(channel, request("hello", 2000))
        stream.wait_for_tokens()
        assert product.stop(number) == 0
        stream.join()
    assert stream.reason == "LENGTH"
    assert len(stream.ids) == 2000
    assert product.left_behind() == []
    assert product.lines[-1] == "stopped"
    assert any("draining 1 stream, at most 30 s" in line for line in product.lines)
    assert not [line for line in product.lines if "engine_unavailable" in line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_before_it_serves_is_one_line_and_no_success(launch: Launch, number: signal.Signals) -> None:
    product = launch()
    product.wait_for("bootstrap: settings")
    assert product.stop(number) == 128 + number
    assert product.lines[-1] == "blink: stopped before it served"
    assert not [line for line in product.lines if "draining 0" in line or "nanobind" in line]
    assert product.left_behind() == []


def test_a_second_interrupt_stops_at_once_and_leaves_nothing(launch: Launch) -> None:
    product = launch("--set", "gateway.drain_limit=600")
    with product.channel() as channel:
        stream = Stream(channel, request("hello", 4000))
        stream.wait_for_tokens()
        product.process.send_signal(signal.SIGINT)
        product.wait_for("gateway-0: draining 1 stream, at most 600 s; Ctrl-C again stops at once")
        product.process.send_signal(signal.SIGINT)
        assert product.end() == 130
        stream.join()
    assert product.left_behind() == []


def test_a_killed_blink_up_takes_its_children_with_it(launch: Launch) -> None:
    product = launch("--workers", "2")
    assert product.address
    assert len(product.processes()) == 3
    product.process.kill()
    product.end()
    until(lambda: not product.processes())
    assert product.left_behind() == []


def test_a_port_in_use_is_refused_before_anything_starts(launch: Launch) -> None:
    first = launch()
    second = launch("--listen", first.address)
    assert second.end() == 1
    assert second.lines[-1].startswith(f"blink: cannot listen on {first.address}: Address already in use; ")
    assert "--listen" in second.lines[-1]
    assert first.blink("status").returncode == 0


def test_a_port_taken_by_another_program_is_refused(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        product = launch("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        assert product.end() == 1
    assert "Address already in use" in product.lines[-1]
    assert product.left_behind() == []


def test_the_same_instance_twice_is_refused_and_the_first_goes_on(launch: Launch) -> None:
    first = launch()
    assert first.address
    second = launch(instance=first.instance)
    assert second.end() == 1
    assert len(second.lines) == 1  # before anything starts
    assert f"instance '{first.instance}' runs already" in second.lines[0]
    assert "--instance" in second.lines[0]
    assert first.blink("generate", "hello", "--raw", "--max-tokens", "4").returncode == 0


def test_a_stale_ring_of_a_killed_run_is_replaced(launch: Launch) -> None:
    first = launch()
    assert first.address
    bootstrap, gateway = first.bootstrap, first.gateway(0)
    first.process.send_signal(signal.SIGSTOP)  # so that it restarts nothing
    bootstrap.kill()
    until(lambda: bootstrap.status() == "zombie")
    assert ring_path(first.instance).exists()
    gateway.kill()
    first.process.kill()
    first.end()
    second = launch(instance=first.instance)
    assert second.blink("generate", "hello", "--raw", "--max-tokens", "4").returncode == 0
    assert second.stop() == 0
    assert second.left_behind() == []


def test_two_instances_run_side_by_side(launch: Launch) -> None:
    first, second = launch(), launch()
    assert first.address != second.address
    for product in (first, second):
        assert product.blink("generate", "hello", "--raw", "--max-tokens", "4").returncode == 0
    assert first.stop() == 0
    assert second.blink("status").returncode == 0
    assert second.stop() == 0
    assert second.left_behind() == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere.gguf"], ["'/nowhere.gguf'", "No such file"]),
        (["--engine", "cuda"], ["engine is 'cuda'", "--engine cpu"]),
        (["--set", "bootstrap.kv_tokenz=1"], ["unknown setting kv_tokenz (did you mean kv_tokens?)"]),
        (["--set", "bootstrap.kv_tokens=1"], ["kv_tokens is '1'", "16"]),
        (["--set", "gateway.worker=3"], ["gateway.worker=3", "chooses"]),
        (["--set", "gateway.log-format=console"], ["log-format", "chooses"]),
        (["--instance", "a/b c"], ["instance is 'a/b c', must be", "a-z"]),
        (["--set", "nonsense"], ["bootstrap.NAME=VALUE"]),
        (["--workers", "9"], ["--workers is 9", "4 lanes"]),
    ],
)
def test_what_cannot_start_says_so_in_one_line(launch: Launch, flags: list[str], words: list[str]) -> None:
    product = launch(*flags)
    assert product.end() != 0
    assert all(word in product.lines[-1] for word in words), product.lines
    told = [line for line in product.lines if words[0] in line and ": settings " not in line]
    assert len(told) == 1
    assert not [line for line in product.lines if "Traceback" in line]
    assert product.left_behind() == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [(lambda data: b"XXXX" + data[4:], "not a GGUF file"), (lambda data: data[: len(data) // 2], "truncated")],
)
def test_a_damaged_model_says_so_in_one_line(
    launch: Launch, tiny_model: Path, tmp_path: Path, damage: object, words: str
) -> None:
    path = tmp_path / "damaged.gguf"
    assert callable(damage)
    path.write_bytes(damage(tiny_model.read_bytes()))
    product = launch(model=str(path))
    assert product.end() == 1
    assert "damaged.gguf" in product.lines[-1]
    assert words in product.lines[-1]
    assert product.left_behind() == []


def test_a_model_whose_tokenizer_cannot_be_served_says_so_in_one_line(launch: Launch, tmp_path: Path) -> None:
    config = tiny_config()
    write_hugging_face(tmp_path, config, random_weights(config))
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = tokenizer["decoder"] = {
        "type": "Metaspace",
        "replacement": "_",
        "prepend_scheme": "first",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    product = launch(model=str(tmp_path))
    assert product.end() == 1
    assert "the tokenizer's decoder is ['Metaspace'], only ByteLevel is supported" in product.lines[-1]
    assert not [line for line in product.lines if "Traceback" in line]
    assert product.left_behind() == []
