"""A soak of the whole product: requests by gRPC and HTTP mixed, a third of them cancelled at random times.

    python -m bench.mixed_soak [--requests 10000 | --seconds 1800] [--tls] [--in-flight 96]

``blink up`` with two gateway workers and the cpu engine serves a tiny model with random weights. More requests are in
flight than there are slots, so some are refused, some shed by priority, and come again. Every answer is checked
(bench/mixed_clients.py). Afterwards slots, KV pages, open streams and file descriptors must be exactly what they were
before, and no process may have grown by more than a few MiB since the first tenth. Exits with 1 on a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import shutil
import ssl
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import httpx2
import trustme
from blink.v1 import control_pb2, control_pb2_grpc
from rich.console import Console
from rich.table import Table

from bench.mixed_clients import CANCELLED, OK, Ask, WrongAnswerError, connected, demand
from tests.e2e.product import Product
from tests.gpu_engine.models.tiny import random_weights, tiny_config, write_gguf

WORKERS = 2
WARM_UP = 400  # requests before anything is compared
SAMPLE_SECONDS = 5.0
QUIET_SECONDS = 90.0  # more than a server waits for the rest of a TLS handshake whose client forgot its socket
GROWTH_LIMIT = 16 << 20  # bytes that a process may grow after the first tenth


@dataclass(frozen=True)
class Account:
    """What must be the same before and after; but descriptors may be fewer.

    A connection that was cut off in its TLS handshake keeps one until that is given up, which may be between the two.
    """

    free_slots: int
    free_pages: int
    requests: int  # running or waiting in the engine
    open_requests: float  # in the gateways
    files: dict[str, int]  # descriptors by process

    def is_left_by(self, after: Account) -> bool:
        """Whether ``after`` holds nothing that was not there already."""
        fewer = all(after.files[name] <= count for name, count in self.files.items())
        return fewer and replace(after, files=self.files) == self


class Subject:
    """The product under test."""

    def __init__(self, directory: Path, tls: bool) -> None:
        flags: list[str] = []
        self.trusted: bytes | None = None  # PEM of the authority; None without TLS
        if tls:
            authority = trustme.CA()
            issued = authority.issue_cert("127.0.0.1")
            self.trusted = authority.cert_pem.bytes()
            certificate, key = directory / "tls.crt", directory / "tls.key"
            issued.private_key_pem.write_to_path(str(key))
            certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
            flags = [f"--set=gateway.tls_certificate={certificate}", f"--set=gateway.tls_key={key}"]
        config = tiny_config(context=4096)
        write_gguf(directory / "tiny.gguf", config, random_weights(config))
        runtime = directory / "run"
        runtime.mkdir()
        settings = ("bootstrap.slots_per_lane=16", "bootstrap.max_running=12", "bootstrap.kv_tokens=16384")
        flags += [f"--workers={WORKERS}", *(f"--set={setting}" for setting in settings)]
        self.product = Product(runtime, "--model", str(directory / "tiny.gguf"), *flags)
        self.address, self.url = self.product.address, self.product.http
        self.processes = {"bootstrap": self.product.bootstrap}
        self.processes |= {f"gateway {worker}": self.product.gateway(worker) for worker in range(WORKERS)}

    def account(self) -> Account:
        files = {name: process.num_fds() for name, process in self.processes.items()}  # before there are ours
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self.trusted is None:
            channel = grpc.insecure_channel(self.address, options=options)
        else:
            credentials = grpc.ssl_channel_credentials(self.trusted)
            channel = grpc.secure_channel(self.address, credentials, options=options)
        with channel:
            load = control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest(), timeout=30)
        verify = True if self.trusted is None else ssl.create_default_context(cadata=self.trusted.decode())
        with httpx2.Client(verify=verify) as client:
            figures = client.get(f"{self.url}/metrics").text
        opened = next(line for line in figures.splitlines() if line.startswith("blink_gateway_open_requests"))
        return Account(
            load.free_slots,
            load.free_kv_pages,
            load.running_requests + load.waiting_requests,
            float(opened.split()[-1]),
            files,
        )

    def memory(self) -> dict[str, int]:
        """Bytes in memory by process, without what it shares."""
        return {name: process.memory_full_info().uss for name, process in self.processes.items()}

    async def settled(self, wanted: Account | None = None) -> Account:
        """The account once nothing is in flight and nothing changes any more, or once it is as ``wanted``."""
        deadline = time.monotonic() + QUIET_SECONDS
        before = None
        while True:
            now = await asyncio.to_thread(self.account)
            calm = now.requests == 0 and now.open_requests == 0
            settled = wanted.is_left_by(now) if wanted else now == before
            if (calm and settled) or time.monotonic() > deadline:
                return now
            before = now
            await asyncio.sleep(0.5)


class Soak:
    def __init__(self, subject: Subject, arguments: argparse.Namespace) -> None:
        self._subject = subject
        self._arguments = arguments
        self._dice = random.Random(arguments.seed)
        self.samples: list[tuple[float, dict[str, int]]] = []  # seconds since the start, bytes
        self.sent = 0

    async def load(self, requests: int | None, seconds: float | None) -> dict[str, int]:
        """So many requests, or as many as the time allows; counts of how they ended. Raises WrongAnswerError."""
        subject = self._subject
        end = None if seconds is None else time.monotonic() + seconds
        left = requests
        async with connected(subject.address, subject.url, subject.trusted) as clients:

            async def worker() -> None:
                nonlocal left
                while (left is None or left > 0) and (end is None or time.monotonic() < end):
                    left = None if left is None else left - 1
                    self.sent += 1
                    await clients.run(Ask.roll(self._dice))

            async with asyncio.TaskGroup() as group:
                for _ in range(self._arguments.in_flight):
                    group.create_task(worker())
            return dict(clients.counts)

    async def sample(self) -> None:
        """Note memory until cancelled."""
        begun = time.monotonic()
        while True:
            self.samples.append((time.monotonic() - begun, await asyncio.to_thread(self._subject.memory)))
            await asyncio.sleep(SAMPLE_SECONDS)


def report(soak: Soak, counts: dict[str, int], before: Account, after: Account, seconds: float) -> None:
    console = Console(width=110)
    table = Table("what", "seen")
    table.add_row("machine", f"{os.cpu_count()} x {platform.processor() or platform.machine()}, {platform.release()}")
    table.add_row("requests, seconds", f"{soak.sent:,} in {seconds:.0f} s, {soak.sent / seconds:.0f}/s")
    for name, count in sorted(counts.items()):
        table.add_row(name, f"{count:,}")
    for field in ("free_slots", "free_pages", "requests", "open_requests", "files"):
        table.add_row(f"{field}, before and after", f"{getattr(before, field)} {getattr(after, field)}")
    console.print(table)
    memory = Table("MiB in memory at", *(soak.samples[0][1] if soak.samples else ()))
    step = max(1, len(soak.samples) // 8)
    for at, row in [*soak.samples[::step], soak.samples[-1]]:
        memory.add_row(f"{at:.0f} s", *(f"{size / 2**20:.1f}" for size in row.values()))
    console.print(memory)


def check(soak: Soak, before: Account, after: Account) -> None:
    """Raises WrongAnswerError."""
    demand(before.is_left_by(after), "something is left", before, after)
    settled = soak.samples[len(soak.samples) // 10][1]
    grown = {name: soak.samples[-1][1][name] - settled[name] for name in settled}
    demand(all(size < GROWTH_LIMIT for size in grown.values()), "a process has grown, bytes", grown)


async def run(subject: Subject, arguments: argparse.Namespace) -> None:
    soak = Soak(subject, arguments)
    await soak.load(WARM_UP if arguments.seconds else min(WARM_UP, arguments.requests // 3), None)
    before, soak.sent = await subject.settled(), 0
    begun = time.monotonic()
    sampler = asyncio.create_task(soak.sample())
    try:
        counts = await soak.load(None if arguments.seconds else arguments.requests, arguments.seconds)
    finally:
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler
    seconds = time.monotonic() - begun
    after = await subject.settled(before)
    soak.samples.append((time.monotonic() - begun, subject.memory()))
    report(soak, counts, before, after, seconds)
    check(soak, before, after)
    protocols = ("grpc", "completions", "chat")
    endings = [counts.get(f"{protocol} {ending}", 0) for protocol in protocols for ending in (OK, CANCELLED)]
    demand(min(endings) > 0, "too mild: some ending was never seen", counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, help="instead of a number of requests")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--in-flight", type=int, default=96)
    parser.add_argument("--seed", type=int, default=time.time_ns() & 0xFFFF)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="blink-"))
    try:
        subject = Subject(directory, arguments.tls)
        try:
            asyncio.run(run(subject, arguments))
            demand(subject.product.stop() == 0, "blink up ends with a code", subject.product.lines[-5:])
            demand(subject.product.left_behind() == [], "left behind", subject.product.left_behind())
        finally:
            subject.product.destroy()
    except* WrongAnswerError as faults:
        sys.exit(f"FAULT (seed {arguments.seed}): {faults.exceptions[0]}")
    finally:
        shutil.rmtree(directory)
    print("no fault")


if __name__ == "__main__":
    main()
