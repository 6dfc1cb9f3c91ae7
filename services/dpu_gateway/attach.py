"""One try to attach: the handshake with the bootstrap, and a transport to the ring that it grants."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from importlib import import_module
from typing import Protocol

import grpc
from blink.v1 import bootstrap_pb2, bootstrap_pb2_grpc

from services.common.tls import TlsError
from services.dpu_gateway.settings import GatewaySettings
from services.ring.schema import ABI_VERSION, LAYOUT_HASH
from services.ring.shm import ShmTransport
from services.ring.transport import Transport
from services.ring.verbs.grant import LaneGrant

_OPTIONS = (
    ("grpc.max_receive_message_length", 256 << 20),  # a tokenizer and a template of any size travel in the handshake
    ("grpc.use_local_subchannel_pool", 1),  # so that each try connects anew, whatever gRPC thinks of the one before
)
_GROWTH = 2.0
_NOBODY = ("Connection refused", "No such file or directory")  # in the words of gRPC, which say it at length


class AttachError(Exception):
    """This try to attach failed; the message says why."""


class Backoff:
    """Seconds between tries: from ``first``, doubling up to ``longest``, each within a quarter around, so that gateways
    that lost the same engine do not come back all at once."""

    def __init__(self, first: float, longest: float, rng: Callable[[], float] = random.random) -> None:
        self._first, self._longest = min(first, longest), longest
        self._rng = rng
        self._next = self._first

    def next(self) -> float:
        delay = self._next
        self._next = min(self._longest, delay * _GROWTH)
        return delay * (0.75 + self._rng() / 2)

    def reset(self) -> None:
        self._next = self._first


async def ask_for_lane(
    target: str, settings: GatewaySettings, request: bootstrap_pb2.AttachRequest
) -> bootstrap_pb2.AttachResponse:
    """The bootstrap's grant, whose versions and model are what this gateway asked for. Raises AttachError."""
    try:
        async with _channel(target, settings) as channel:
            grant = await bootstrap_pb2_grpc.BootstrapStub(channel).Attach(request, timeout=settings.attach_timeout)
    except TlsError as error:
        raise AttachError(str(error)) from error
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        nobody = next((each for each in _NOBODY if each in details), None)
        if error.code() is grpc.StatusCode.UNAVAILABLE and nobody:
            raise AttachError(f"no bootstrap answers at {target}: {nobody}") from error
        raise AttachError(f"the bootstrap at {target} grants no lane: {details}") from error
    for field, theirs, ours in (
        ("abi_version", grant.abi_version, ABI_VERSION),
        ("layout_hash", grant.layout_hash, LAYOUT_HASH),
        ("model fingerprint", grant.model.fingerprint, settings.model_fingerprint or grant.model.fingerprint),
    ):
        if theirs != ours:
            raise AttachError(f"{field} of the bootstrap at {target} is {theirs}, of this gateway {ours}")
    return grant


def _channel(target: str, settings: GatewaySettings) -> AbstractAsyncContextManager[grpc.aio.Channel]:
    if settings.tls is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    files = settings.tls.read()
    credentials = grpc.ssl_channel_credentials(files.authority, files.key, files.certificate)
    name = settings.bootstrap_name
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", name)) if name else _OPTIONS
    return grpc.aio.secure_channel(target, credentials, options=options)


class Connector(Protocol):
    """One try's side of a transport, from request to connection. ``close`` lets go of what was not connected."""

    def prepare(self, request: bootstrap_pb2.AttachRequest) -> None:
        """Put into the request what the bootstrap must know of this side."""

    def connect(self, grant: bootstrap_pb2.AttachResponse) -> Transport:
        """The transport to the granted lane. Raises AttachError or RingError."""

    def close(self) -> None: ...


def connector_for(settings: GatewaySettings) -> Callable[[GatewaySettings], Connector]:
    """What makes a try's connector. Raises RingError at once when this machine can't do what is set."""
    if settings.transport == "shm":
        return _ShmConnector
    import_module("services.ring.verbs.device")  # needs pyverbs, which is missed best at the start
    return _VerbsConnector


class _ShmConnector:
    def __init__(self, _settings: GatewaySettings) -> None: ...

    def prepare(self, request: bootstrap_pb2.AttachRequest) -> None: ...

    def connect(self, grant: bootstrap_pb2.AttachResponse) -> Transport:
        _require(grant, "shm")
        return ShmTransport(grant.shm.path)

    def close(self) -> None: ...


class _VerbsConnector:
    """The device is opened for each try: a port that was down, or a device that was reset, is seen as it is now."""

    def __init__(self, settings: GatewaySettings) -> None:
        from services.ring.verbs.device import Device  # noqa: PLC0415
        from services.ring.verbs.queue_pair import QueuePair  # noqa: PLC0415

        self._device: Device | None = Device(
            settings.rdma_device, port=settings.rdma_port, gid_index=settings.rdma_gid_index, mtu=settings.rdma_mtu
        )
        self._queue_pair = QueuePair(self._device)

    def prepare(self, request: bootstrap_pb2.AttachRequest) -> None:
        request.queue_pair.CopyFrom(bootstrap_pb2.QueuePairAddress(**asdict(self._queue_pair.address)))

    def connect(self, grant: bootstrap_pb2.AttachResponse) -> Transport:
        from services.ring.verbs.transport import VerbsTransport  # noqa: PLC0415

        _require(grant, "verbs")
        try:
            lane = LaneGrant.of(grant.verbs)
        except ValueError as error:
            raise AttachError(f"the bootstrap's grant makes no sense: {error}") from error
        transport = VerbsTransport(self._queue_pair, lane, device=self._device)
        self._device = None  # the transport's
        return transport

    def close(self) -> None:
        if self._device is not None:
            self._queue_pair.close()
            self._device.close()


def _require(grant: bootstrap_pb2.AttachResponse, transport: str) -> None:
    offered = grant.WhichOneof("transport")
    if offered != transport:
        raise AttachError(f"the bootstrap offers transport {offered}, this gateway is set to {transport}")
