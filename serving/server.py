"""The HTTP server, which answers all requests of open connections before it ends."""

import asyncio
import socket
import time

import uvicorn

from metaphrase.serving.service import Service

# Time for clients of open connections to send a request that they began before the end.
_GRACE_SECONDS = 0.5


class Server(uvicorn.Server):
    """Runs an application until a signal.

    Then it takes no new connections. On open ones it answers the requests that still come for a moment, and tells each client
    that its connection ends. uvicorn alone would reset a connection whose next request has arrived but is not read.
    """

    def __init__(self, config: uvicorn.Config, service: Service):
        """Join the parts."""
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End when all requests are answered."""
        for server in self.servers:
            server.close()
        self._service.is_draining = True
        end = time.monotonic() + _GRACE_SECONDS
        while self.server_state.connections and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)
