"""The real smg gateway routes to Blink as to vLLM: model, tokenizer and answers all come from Blink."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from tests.e2e.conftest import Launch
from tests.e2e.product import LIMIT, until

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def smg(worker: str, log: Path) -> Iterator[openai.OpenAI]:
    """A client of an smg that routes to ``worker``, once it knows the worker's model."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("smg")), "launch", "--host=127.0.0.1", f"--port={port}"]
    command += ["--worker-urls", f"grpc://{worker}", f"--prometheus-port={free_port()}"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        client = openai.OpenAI(api_key="none", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=LIMIT)

        def knows_the_model() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return MODEL in {model.id for model in client.models.list().data}
            except openai.APIError:
                return False

        until(knows_the_model, log.read_text)
        yield client
        client.close()
    finally:
        process.kill()
        process.wait()


@pytest.mark.model
def test_smg_answers_with_blinks_model_whole_streamed_and_cut_at_a_stop_string(launch: Launch, tmp_path: Path) -> None:
    product = launch("--workers", "2", model=MODEL)
    direct = openai.OpenAI(api_key="none", base_url=f"{product.http}/v1", max_retries=0, timeout=LIMIT)
    with smg(product.address, tmp_path / "smg.log") as routed, direct:
        answers, streams, stopped = [], [], []
        for client in (direct, routed):
            ask = {"model": MODEL, "temperature": 0, "max_tokens": 24}
            messages = [{"role": "user", "content": QUESTION}]
            create = client.chat.completions.create
            answers.append(create(messages=messages, **ask).choices[0])  # type: ignore[call-overload]
            chunks = create(messages=messages, stream=True, **ask)  # type: ignore[call-overload]
            streams.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
            stopped.append(create(messages=messages, stop=[" France"], **ask).choices[0])  # type: ignore[call-overload]
    assert "Paris" in answers[0].message.content
    assert answers[0].message.content == answers[1].message.content == streams[0] == streams[1]
    assert [choice.finish_reason for choice in (*answers, *stopped)] == ["stop"] * 4
    assert stopped[0].message.content == stopped[1].message.content == "The capital of"
    assert product.stop() == 0
    assert product.left_behind() == []
