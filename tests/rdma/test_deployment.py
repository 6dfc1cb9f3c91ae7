"""The split deployment: real gateway, real clients, the real model on the cpu engine; between them soft-RoCE alone.

The tests run in order over one deployment, as each start of the engine takes the emulated machine many seconds. What
each has to leave is a deployment that answers, which the next one begins with.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

if TYPE_CHECKING:
    from tests.rdma.deployment import Deployment, Stream

LINK = Path(__file__).parent / "vm/link.sh"
GOLDENS = json.loads((Path(__file__).parents[1] / "gpu_engine/cpu/goldens.json").read_text())["goldens"]
CLEAR_MARGIN = 0.05  # of logits, above which the order of summation can't change the greedy token
LOSS_LIMIT = 8.0  # seconds from a loss to the status of the last stream: retries end after 2 s, processors are slow


FLAPS = 10  # times that the link comes for a second and goes for one


def clear_prefix(golden: dict[str, list[float]], at_most: int) -> int:
    """How many of its tokens are beyond doubt."""
    unclear = (index for index, margin in enumerate(golden["margins"]) if margin <= CLEAR_MARGIN)
    return min(at_most, next(unclear, len(golden["tokens"])))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    from tests.rdma.deployment import Deployment  # noqa: PLC0415 (needs what only the emulated machine has)

    deployment = Deployment(tmp_path_factory.mktemp("tls"), Path(os.environ["BLINK_MODEL_FILE"]))
    try:
        deployment.engine.wait_for("ready")
        deployment.gateway.wait_for("attached")
        yield deployment
    finally:
        deployment.stop()
        deployment.show()


def ask(channel: grpc.Channel, prompt: list[int], max_tokens: int) -> Stream:
    from tests.rdma.deployment import Stream  # noqa: PLC0415

    return Stream(channel, prompt, max_tokens)


def long_streams(channel: grpc.Channel) -> list[Stream]:
    """Two that have begun and would go on for long."""
    streams = [ask(channel, [token], 200) for token in (28, 253)]
    for stream in streams:
        stream.wait_for_token()
    return streams


def assert_answers(deployment: Deployment, goldens: range = range(1), max_tokens: int = 2) -> None:
    """Clients get exactly the model's tokens, nobody else's and none from before."""
    with deployment.channel() as channel:
        streams = [ask(channel, GOLDENS[golden]["prompt"], max_tokens) for golden in goldens]
        for golden, stream in zip(goldens, streams, strict=True):
            stream.join()
            assert stream.finished, (stream.code, stream.details)
            assert len(stream.ids) == max_tokens
            count = clear_prefix(GOLDENS[golden], max_tokens)
            assert stream.ids[:count] == GOLDENS[golden]["tokens"][:count]


def assert_lost(streams: list[Stream], since: float, limit: float = LOSS_LIMIT) -> None:
    for stream in streams:
        stream.join()
        assert stream.code is grpc.StatusCode.UNAVAILABLE, (stream.code, stream.details)
        assert not stream.finished
        assert stream.ended_at - since < limit
        print(f"{stream.code.name} after {stream.ended_at - since:.2f} s: {stream.details}")


def test_concurrent_clients_get_the_models_tokens_over_rdma(deployment: Deployment) -> None:
    assert_answers(deployment, range(2))
    granted = deployment.engine.wait_for("lane_granted")
    assert (granted["certificate"], granted["transport"]) == ("dpu-a", "verbs")
    assert deployment.load().generated_tokens == 4


def test_a_cut_link_ends_streams_as_unavailable_and_the_gateway_comes_back_by_itself(deployment: Deployment) -> None:
    with deployment.channel() as channel:
        streams = long_streams(channel)
        cut_at = time.monotonic()
        subprocess.run(["sh", LINK, "down"], check=True)
        try:
            assert_lost(streams, cut_at)
            assert [event["cause"] for event in deployment.gateway.events if "cause" in event] == ["RETRY_EXC_ERR"]
            refused = ask(channel, [28], 2).join()
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            for end in ("up", "down") * FLAPS:  # long enough to begin attaching, on a fast machine to end it
                subprocess.run(["sh", LINK, end], check=True)
                time.sleep(1)
        finally:
            subprocess.run(["sh", LINK, "up"], check=True)
        deployment.gateway.wait_until_settled()
    assert_answers(deployment)


def test_a_killed_gateways_requests_are_gone_and_its_successor_serves(deployment: Deployment) -> None:
    with deployment.channel() as channel:
        streams = long_streams(channel)
        killed_at = time.monotonic()
        deployment.gateway.kill()
        assert_lost(streams, killed_at)
    deployment.start_gateway().wait_for("attached")
    assert_answers(deployment)
    load = deployment.load()
    assert (load.running_requests, load.waiting_requests, load.free_kv_pages) == (0, 0, load.total_kv_pages)
    assert [lane.attached for lane in load.lanes] == [True, False]


def test_a_killed_engine_ends_streams_as_unavailable_and_its_successor_is_found(deployment: Deployment) -> None:
    with deployment.channel() as channel:
        streams = long_streams(channel)
        epoch, attached = deployment.load().engine_epoch, deployment.gateway.count("attached")
        killed_at = time.monotonic()
        deployment.engine.kill()
        assert_lost(streams, killed_at)
    deployment.start_engine().wait_for("ready")
    deployment.gateway.wait_for("attached", attached + 1)
    assert deployment.load().engine_epoch > epoch
    assert_answers(deployment)


def probe() -> subprocess.CompletedProcess[str]:
    """What the engine's container is judged by."""
    command = [sys.executable, "-m", "services.bootstrap.probe"]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)


def test_the_engines_probe_tells_one_that_serves_from_one_that_stands_still(deployment: Deployment) -> None:
    done = probe()
    assert (done.returncode, done.stderr) == (0, "")
    deployment.engine.process.send_signal(signal.SIGSTOP)
    try:
        done = probe()
    finally:
        deployment.engine.process.send_signal(signal.SIGCONT)
    assert (done.returncode, "does not answer" in done.stderr) == (1, True), done.stderr
    deployment.gateway.wait_until_settled()
    assert_answers(deployment)
