"""A small API server of Kubernetes over real HTTP: EndpointSlices, listed and watched as the real one does."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

NAMESPACE = "pdkv"
Object = dict[str, Any]


def endpoint(host: str, address: str = "10.0.0.1", **conditions: bool) -> Object:
    """Of a pod of a StatefulSet; without `host` of a Deployment."""
    found: Object = {"addresses": [address], "conditions": {"ready": True, "serving": True, **conditions}}
    return found | ({"hostname": host} if host else {})


@dataclass(eq=False)
class ApiServer:
    """What it keeps, and what it has been asked."""

    address: str = ""
    slices: dict[str, Object] = field(default_factory=dict)
    version: int = 100
    watches: set[asyncio.Queue[str | None]] = field(default_factory=set)
    asked: list[dict[str, str]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    watched: asyncio.Event = field(default_factory=asyncio.Event)
    silent: bool = False
    status: int = 200
    """Of every answer."""
    watch_status: int = 200
    patience_s: float = 0.0
    """Beyond what a watch was asked to take."""

    def put(self, name: str, endpoints: list[Object] | None, port: int = 7000, service: str = "prefill") -> None:
        """Another state of a slice, which watchers hear of."""
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.version += 1
        self.slices[name] = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "resourceVersion": str(self.version),
                "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": "IPv4",
            "endpoints": endpoints,
            "ports": [
                {"name": "metrics", "port": 9400, "protocol": "TCP"},
                {"name": "grpc", "port": port, "protocol": "TCP"},
            ],
        }
        self.say(kind, self.slices[name])

    def delete(self, name: str) -> None:
        self.version += 1
        self.say("DELETED", self.slices.pop(name))

    def say(self, kind: str, what: Object) -> None:
        self.write(json.dumps({"type": kind, "object": what}) + "\n")

    def write(self, line: str) -> None:
        for queue in self.watches:
            queue.put_nowait(line)

    def forget(self) -> None:
        """Versions, as it does after some minutes: watchers get 410 Gone."""
        self.say("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"})
        self.end()

    def end(self) -> None:
        """Every watch."""
        for queue in self.watches:
            queue.put_nowait(None)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = dict(request.query)
        if self.silent:
            await asyncio.Event().wait()
        self.asked.append(asked)
        self.tokens.append(request.headers.get("Authorization", ""))
        status = self.watch_status if "watch" in asked and self.status == 200 else self.status
        if status != 200:
            return web.json_response({"kind": "Status", "code": status}, status=status)
        if request.match_info["namespace"] != NAMESPACE:
            return web.json_response({"kind": "EndpointSliceList", "metadata": {}, "items": []})
        label, _, service = asked["labelSelector"].partition("=")
        items = [each for each in self.slices.values() if each["metadata"]["labels"][label] == service]
        if "watch" not in asked:
            listed = {"resourceVersion": str(self.version)}
            return web.json_response({"kind": "EndpointSliceList", "metadata": listed, "items": items})
        return await self._watched(request, asked)

    async def _watched(self, request: web.Request, asked: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self.watches.add(queue)
        for each in self.slices.values():
            if int(each["metadata"]["resourceVersion"]) > int(asked["resourceVersion"]):
                queue.put_nowait(json.dumps({"type": "MODIFIED", "object": each}) + "\n")
        self.watched.set()
        try:
            async with asyncio.timeout(float(asked["timeoutSeconds"]) + self.patience_s):
                while (line := await queue.get()) is not None:
                    await response.write(line.encode())
        except TimeoutError:
            pass
        finally:
            self.watches.discard(queue)
        return response


@asynccontextmanager
async def api_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    server.address = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    try:
        yield server
    finally:
        server.end()
        await runner.cleanup()


def kubeconfig(path: Path, server: ApiServer) -> Path:
    """For whoever is in no pod."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE}}],
        "clusters": [{"name": "test", "cluster": {"server": server.address}}],
        "users": [{"name": "test", "user": {"token": "secret"}}],
    }
    path.write_text(yaml.safe_dump(config), "utf-8")
    return path
