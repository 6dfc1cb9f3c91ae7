"""A gateway's metrics, with figures that a test chooses: real metric objects behind a real port."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from services.dpu_gateway.metrics.gateway import GatewayMetrics
from tests.cluster.control_plane import free_ports


class MetricsPage:
    """Start it as a context."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self._metrics = GatewayMetrics()
        self._registry = CollectorRegistry()
        self._registry.register(self._metrics)

    def __enter__(self) -> MetricsPage:
        self._server, self._thread = start_http_server(self.port, "127.0.0.1", self._registry)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    def serve(self, seconds: float, count: int = 200) -> None:
        """Requests whose first token took this long."""
        for _ in range(count):
            self._metrics.of_model("m").first_token.observe(seconds)
