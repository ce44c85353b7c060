"""The same bytes without pdkv: raw NIXL, process_vm_readv, memcpy, gRPC, sockets, UCX, Mooncake.

    python raw.py source [--listen HOST:PORT]      python raw.py sink

Imports nothing of pdkv. Either role answers lines of JSON on stdin (or on one connection) with lines of JSON on stdout:
`pool`, then `open`, `read` (sink only), `close` as often as wanted, `usage` at any time; it ends when its input does.

Guarantees: page p of the source holds bytes that follow from the seed and p; with `verify` the sink's memory is cleared
before it is read into, and compared with those bytes afterwards; nothing of a kind is left after `close`: no agent, no
thread that polls; seconds are of `perf_counter`, CPU seconds of the whole process. A kind that can't be used here is
answered with `absent` and the reason.

Who can reach `--listen` can make it fill memory and serve it: for a trusted network, as long as a benchmark takes.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import mmap
import os
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from time import perf_counter
from typing import Any

import numpy as np

LIBC = ctypes.CDLL(None, use_errno=True)
HUGE = 2 << 20
SPIN_S, FIRST_NAP_S, NAP_S, WORK_S = 0.0001, 0.00005, 0.0005, 0.00005
"""pdkv's pace: a poll that took more CPU time than WORK_S moved bytes; SPIN_S without one, and naps begin."""
WARM_PAGES = 4
"""Read before anything is timed: a rail has its connection after its first one."""
MESSAGE_BYTES = 4 << 20
READV_BYTES, READV_VECTORS = 1 << 30, 1024
MOONCAKE_BATCH = 512
SETTING = re.compile(r"UCX_(TLS|TCP_\w+|CUDA_IPC_\w+)")

Span = tuple[int, int]
"""Offset in a region, length."""
Order = tuple[list[int], list[int]]
"""Page ids, here and there."""
Rail = tuple[Any, str, Any, Any]
"""Agent, its peer, and prepared descriptors of this pool and of the peer's."""
Took = tuple[float, float]
"""Seconds until everything was posted, and until everything was there."""


class Layout:
    """Where pages are in a region: (length, base, stride) of each piece of a page, in the order of its content."""

    def __init__(self, pieces: Sequence[tuple[int, int, int]], pages: int) -> None:
        self.pieces, self.pages = pieces, pages
        self.page_bytes = sum(length for length, _, _ in pieces)
        self.region_bytes = max(base + (pages - 1) * stride + length for length, base, stride in pieces)

    def spans(self, pages: Iterable[int]) -> list[Span]:
        """Page after page, piece after piece."""
        return [(base + page * stride, length) for page in pages for length, base, stride in self.pieces]

    def table(self, address: int) -> np.ndarray[Any, Any]:
        """Strided descriptors, a row a piece; index piece * pages + page."""
        return np.array([(address + b, n, 0, stride, self.pages) for n, b, stride in self.pieces], np.uint64)

    def indices(self, pages: Sequence[int]) -> np.ndarray[Any, Any]:
        starts = np.arange(len(self.pieces), dtype=np.int32)[:, None] * np.int32(self.pages)
        return (starts + np.asarray(pages, np.int32)[None, :]).reshape(-1)


class Memory:
    """A region, touched; on huge pages if wanted and to be had."""

    def __init__(self, length: int, *, huge: bool) -> None:
        mapping = mmap.mmap(-1, length + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(mapping, np.uint8)
        skew = -whole.ctypes.data % HUGE
        self.array = whole[skew : skew + length]
        self.array.fill(0)
        self.address: int = self.array.ctypes.data
        self.view = self.array.data


class Pool:
    """What both roles have: a region with a layout, and the content that the source's pages have."""

    def __init__(self, role: str, words: dict[str, Any]) -> None:
        self.role, self.tuned, self.spin = role, bool(words["tuned"]), bool(words["spin"])
        self.host = str(words.get("host", "127.0.0.1"))
        self.here = Layout([(n, base, stride) for n, base, stride, _, _ in words["pieces"]], words["pages"])
        self.there = Layout([(n, base, stride) for n, _, _, base, stride in words["pieces"]], words["pages"])
        self.starts = list(accumulate((n for n, _, _ in self.there.pieces[:-1]), initial=0))
        self.noise = np.frombuffer(
            np.random.default_rng(words["seed"]).bytes(self.there.page_bytes + 8 * self.there.pages), np.uint8
        )
        os.environ.update({key: value for key, value in words["ucx"].items() if SETTING.fullmatch(key)})
        mine = self.there if role == "source" else self.here
        # the largest descriptor brings the source's whole layout
        length = max(mine.region_bytes, self.there.region_bytes)
        self.memory = Memory(length, huge=self.tuned)
        if role == "source":
            self.fill(self.memory)

    def contents(self, pages: Iterable[int]) -> list[int]:
        """Address of what the source has in each piece: page p is the noise from byte 8 p on."""
        return [self.noise.ctypes.data + 8 * page + start for page in pages for start in self.starts]

    def fill(self, memory: Memory) -> None:
        pages = range(self.there.pages)
        for (offset, length), content in zip(self.there.spans(pages), self.contents(pages), strict=True):
            ctypes.memmove(memory.address + offset, content, length)

    def wrong(self, places: Iterable[tuple[Span, int]]) -> int:
        """How many of these spans hold something else than what is at these addresses."""
        count = 0
        for (offset, length), content in places:
            mine, theirs = ctypes.c_void_p(self.memory.address + offset), ctypes.c_void_p(content)
            count += LIBC.memcmp(mine, theirs, ctypes.c_size_t(length)) != 0
        return count


class Pace:
    """How long to rest after a poll."""

    def __init__(self, *, spin: bool) -> None:
        self._spin, self._moved, self._nap = spin, perf_counter(), 0.0

    def after(self, poll: Callable[[], Any]) -> float:
        began = time.thread_time()
        poll()
        worked, now = time.thread_time() - began > WORK_S, perf_counter()
        if worked:
            self._moved = now
        if self._spin or now - self._moved < SPIN_S:
            self._nap = 0.0
        else:
            self._nap = min(max(2 * self._nap, FIRST_NAP_S), NAP_S)
        return self._nap


class Nothing:
    """What a kind has, at either side, unless it says otherwise."""

    polled = False
    """Whether its source moves nothing unless polled."""

    def __init__(self, pool: Pool, devices: Sequence[str] = ()) -> None:
        self.pool = pool
        self.endpoint: dict[str, Any] = {}

    def poll(self) -> None: ...
    def close(self) -> None: ...


class Nixl(Nothing):
    """Either side: one agent a device."""

    def __init__(self, pool: Pool, devices: Sequence[str]) -> None:
        from nixl import _api as api

        super().__init__(pool)
        self.polled, self.agents = pool.tuned, []
        config = api.nixl_agent_config(enable_prog_thread=not pool.tuned, backends=[])
        for i, device in enumerate(devices or [""]):
            agent = api.nixl_agent(f"{pool.role}-{os.getpid()}-{i}", config)
            agent.create_backend("UCX", {"engine_config": f"NET_DEVICES={device}"} if device else {})
            agent.register_memory([(pool.memory.address, len(pool.memory.array), 0, "")], "DRAM")
            self.agents.append(agent)
        self.endpoint["metadata"] = [agent.get_agent_metadata().hex() for agent in self.agents]

    def poll(self) -> None:
        for agent in self.agents:
            agent.get_new_notifs()

    def close(self) -> None:
        self.agents.clear()


class NixlPages(Nixl):
    """READs of all pieces: tuned, as pdkv posts them; otherwise as NIXL's examples do."""

    def __init__(self, pool: Pool, devices: Sequence[str], at: dict[str, Any]) -> None:
        super().__init__(pool, devices)
        self.theirs: int = at["address"]
        self.running: list[tuple[Any, Any]] = []
        self.rails: list[Rail] = []
        for agent, metadata in zip(self.agents, at["metadata"], strict=True):
            peer = agent.add_remote_agent(bytes.fromhex(metadata))
            mine = agent.prep_xfer_dlist("", pool.here.table(pool.memory.address), "DRAM")
            theirs = agent.prep_xfer_dlist(peer, pool.there.table(self.theirs), "DRAM")
            self.rails.append((agent, peer, mine, theirs))

    def read(self, order: Order) -> Took:
        rails = self.rails[: len(order[0])]
        posts = [self.prepared(rail, order, slice(i, None, len(rails))) for i, rail in enumerate(rails)]
        began = perf_counter()
        handles = [(rail[0], post()) for rail, post in zip(rails, posts, strict=True)]
        for agent, handle in handles:
            agent.transfer(handle)
        posted, self.running = perf_counter(), handles
        pace = Pace(spin=self.pool.spin or not self.pool.tuned)
        while self.running:
            if (rest_s := pace.after(self.check)) and self.running:
                time.sleep(rest_s)
        ended = perf_counter()
        for _, handle in handles:
            handle.release()
        return posted - began, ended - began

    def check(self) -> None:
        self.running = [each for each in self.running if each[0].check_xfer_state(each[1]) != "DONE"]

    def prepared(self, rail: Rail, order: Order, share: slice) -> Callable[[], Any]:
        """What makes the handle of a rail's share of the pages; only that is timed."""
        agent, _, mine, theirs = rail
        here, there = self.pool.here, self.pool.there
        local, remote = order[0][share], order[1][share]
        if self.pool.tuned:
            left, right = here.indices(local), there.indices(remote)
            return lambda: agent.make_prepped_xfer("READ", mine, left, theirs, right)
        return self.listed(rail, here.spans(local), there.spans(remote))

    def listed(self, rail: Rail, here: Iterable[Span], there: Iterable[Span]) -> Callable[[], Any]:
        agent, peer, _, _ = rail
        left = [(self.pool.memory.address + offset, length, 0) for offset, length in here]
        right = [(self.theirs + offset, length, 0) for offset, length in there]
        return lambda: agent.initialize_xfer(
            "READ", agent.get_xfer_descs(left, "DRAM"), agent.get_xfer_descs(right, "DRAM"), peer
        )

    def close(self) -> None:
        self.rails.clear()
        super().close()


class NixlLargest(NixlPages):
    """One descriptor a rail, from the start of the region, as long as the pages together."""

    def prepared(self, rail: Rail, order: Order, share: slice) -> Callable[[], Any]:
        total = len(order[0]) * self.pool.there.page_bytes
        start, end = total * share.start // share.step, total * (share.start + 1) // share.step
        return self.listed(rail, [(start, end - start)], [(start, end - start)])


class Readv(Nothing):
    def __init__(self, pool: Pool, devices: Sequence[str], at: dict[str, Any]) -> None:
        super().__init__(pool)
        self.pid, self.theirs = int(at["pid"]), int(at["address"])
        LIBC.process_vm_readv.restype = ctypes.c_ssize_t
        self.copy([(0, 1)], [(0, 1)])

    def read(self, order: Order) -> Took:
        here, there = self.pool.here.spans(order[0]), self.pool.there.spans(order[1])
        began = perf_counter()
        step = max(1, min(READV_VECTORS, READV_BYTES // max(length for _, length in here)))
        for i in range(0, len(here), step):
            self.copy(here[i : i + step], there[i : i + step])
        return 0.0, perf_counter() - began

    def copy(self, here: Sequence[Span], there: Sequence[Span]) -> None:
        mine = np.array(here, np.uint64) + np.array([self.pool.memory.address, 0], np.uint64)
        theirs = np.array(there, np.uint64) + np.array([self.theirs, 0], np.uint64)
        left, right = ctypes.c_void_p(mine.ctypes.data), ctypes.c_void_p(theirs.ctypes.data)
        got = LIBC.process_vm_readv(self.pid, left, len(mine), right, len(theirs), 0)
        if got != mine[:, 1].sum():
            raise OSError(ctypes.get_errno(), f"process_vm_readv copied {got} B: {os.strerror(ctypes.get_errno())}")


class Memcpy(Nothing):
    def __init__(self, pool: Pool, devices: Sequence[str], at: dict[str, Any]) -> None:
        super().__init__(pool)
        self.copy = Memory(pool.there.region_bytes, huge=pool.tuned)
        pool.fill(self.copy)

    def read(self, order: Order) -> Took:
        here, there = self.pool.here.spans(order[0]), self.pool.there.spans(order[1])
        mine, theirs = self.pool.memory.address, self.copy.address
        began = perf_counter()
        for (to, length), (start, _) in zip(here, there, strict=True):
            ctypes.memmove(mine + to, theirs + start, length)
        return 0.0, perf_counter() - began


class SocketSource(Nothing):
    def __init__(self, pool: Pool, devices: Sequence[str]) -> None:
        super().__init__(pool)
        self.listener = socket.create_server((pool.host, 0))
        self.endpoint = {"host": pool.host, "port": self.listener.getsockname()[1]}
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        """One sink; an order is a line."""
        try:
            sink, _ = self.listener.accept()
        except OSError:
            return
        with sink, sink.makefile("rb") as orders:
            for order in orders:
                for offset, length in self.pool.there.spans(json.loads(order)):
                    sink.sendall(self.pool.memory.view[offset : offset + length])

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class SocketSink(Nothing):
    def __init__(self, pool: Pool, devices: Sequence[str], at: dict[str, Any]) -> None:
        super().__init__(pool)
        self.socket = socket.create_connection((at["host"], at["port"]))

    def read(self, order: Order) -> Took:
        here = self.pool.here.spans(order[0])
        began = perf_counter()
        self.socket.sendall(json.dumps(order[1]).encode() + b"\n")
        for offset, length in here:
            got = self.socket.recv_into(self.pool.memory.view[offset : offset + length], length, socket.MSG_WAITALL)
            if got != length:
                raise OSError(f"the source closed after {got} of {length} B")
        return 0.0, perf_counter() - began

    def close(self) -> None:
        self.socket.close()


def messages(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Cut into messages of MESSAGE_BYTES, the last one shorter."""
    parts, room = [], MESSAGE_BYTES
    for start, length in spans:
        end = start + length
        while start < end:
            take = min(end - start, room)
            parts.append((start, take))
            start, room = start + take, room - take
            if not room:
                yield parts
                parts, room = [], MESSAGE_BYTES
    if parts:
        yield parts


class GrpcSource(Nothing):
    def __init__(self, pool: Pool, devices: Sequence[str]) -> None:
        import grpc

        def stream(order: bytes, _: object) -> Iterator[bytes]:
            for parts in messages(pool.there.spans(json.loads(order))):
                yield b"".join(pool.memory.view[offset : offset + length] for offset, length in parts)

        super().__init__(pool)
        self.server = grpc.server(ThreadPoolExecutor(1))
        method: Any = {"Read": grpc.unary_stream_rpc_method_handler(stream)}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw.Pages", method),))
        self.endpoint = {"at": f"{pool.host}:{self.server.add_insecure_port(f'{pool.host}:0')}"}
        self.server.start()

    def close(self) -> None:
        self.server.stop(None).wait()


class GrpcSink(Nothing):
    def __init__(self, pool: Pool, devices: Sequence[str], at: dict[str, Any]) -> None:
        import grpc

        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        super().__init__(pool)
        self.channel = grpc.insecure_channel(at["at"], options=options)
        self.ask: Any = self.channel.unary_stream("/raw.Pages/Read")

    def read(self, order: Order) -> Took:
        here, view = messages(self.pool.here.spans(order[0])), self.pool.memory.view
        began = perf_counter()
        for parts, message in zip(here, self.ask(json.dumps(order[1]).encode()), strict=True):
            at, bytes_ = 0, memoryview(message)
            for offset, length in parts:
                view[offset : offset + length] = bytes_[at : at + length]
                at += length
        return 0.0, perf_counter() - began

    def close(self) -> None:
        self.channel.close()


def ucx() -> Any:
    """ucxx, or ucx-py, whose interface it kept."""
    for name in ("ucxx", "ucp"):
        if find_spec(name):
            return import_module(name)
    raise ImportError("neither ucxx nor ucx-py is installed (pip install ucxx-cu12)")


class UcxSource(Nothing):
    def __init__(self, pool: Pool, devices: Sequence[str]) -> None:
        super().__init__(pool)
        self.api, self.loop = ucx(), asyncio.new_event_loop()
        self.listener = self.loop.run_until_complete(self.listen())
        self.endpoint = {"host": pool.host, "port": self.listener.port}
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    async def listen(self) -> Any:
        return self.api.create_listener(self.serve, 0)

    async def serve(self, sink: Any) -> None:
        """Orders are preceded by their length; none has length 0."""
        count = np.empty(1, np.int64)
        await sink.recv(count)
        while count[0]:
            pages = np.empty(count[0], np.int64)
            await sink.recv(pages)
            array = self.pool.memory.array
            await asyncio.gather(*(sink.send(array[at : at + n]) for at, n in self.pool.there.spans(pages.tolist())))
            await sink.recv(count)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.listener.close()
        self.api.reset()


class UcxSink(Nothing):
    def __init__(self, pool: Pool, devices: Sequence[str], at: dict[str, Any]) -> None:
        super().__init__(pool)
        self.api, self.loop = ucx(), asyncio.new_event_loop()
        self.source = self.loop.run_until_complete(self.connect(at["host"], at["port"]))

    async def connect(self, host: str, port: int) -> Any:
        return await self.api.create_endpoint(host, port)

    def read(self, order: Order) -> Took:
        began = perf_counter()
        self.loop.run_until_complete(self.ask(order))
        return 0.0, perf_counter() - began

    async def ask(self, order: Order) -> None:
        await self.source.send(np.array([len(order[1])], np.int64))
        await self.source.send(np.array(order[1], np.int64))
        array = self.pool.memory.array
        await asyncio.gather(*(self.source.recv(array[at : at + n]) for at, n in self.pool.here.spans(order[0])))

    def close(self) -> None:
        self.loop.run_until_complete(self.part())
        self.api.reset()

    async def part(self) -> None:
        await self.source.send(np.zeros(1, np.int64))
        await self.source.close()


class Mooncake(Nothing):
    """Either side."""

    def __init__(self, pool: Pool, devices: Sequence[str], at: dict[str, Any] | None = None) -> None:
        super().__init__(pool)
        self.at = at or {}
        if not find_spec("mooncake"):
            raise ImportError("Mooncake is not installed (pip install mooncake-transfer-engine)")
        self.engine = import_module("mooncake.engine").TransferEngine()
        failed = self.engine.initialize(pool.host, "P2PHANDSHAKE", "tcp", "")
        if failed or self.engine.register_memory(pool.memory.address, len(pool.memory.array)):
            raise OSError("Mooncake's engine does not start, or does not take the memory")
        self.endpoint = {"session": f"{pool.host}:{self.engine.get_rpc_port()}"}

    def read(self, order: Order) -> Took:
        mine = [(self.pool.memory.address + offset, length) for offset, length in self.pool.here.spans(order[0])]
        theirs = [self.at["address"] + offset for offset, _ in self.pool.there.spans(order[1])]
        began = perf_counter()
        for i in range(0, len(mine), MOONCAKE_BATCH):
            addresses, lengths = zip(*mine[i : i + MOONCAKE_BATCH], strict=True)
            ours = theirs[i : i + MOONCAKE_BATCH]
            if self.engine.batch_transfer_sync_read(self.at["session"], list(addresses), ours, list(lengths)):
                raise OSError("Mooncake's engine did not read")
        return 0.0, perf_counter() - began

    def close(self) -> None:
        self.engine.unregister_memory(self.pool.memory.address)
        del self.engine


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "nixl_largest": (Nixl, NixlLargest),
    "nixl_pages": (Nixl, NixlPages),
    "process_vm_readv": (Nothing, Readv),
    "memcpy": (Nothing, Memcpy),
    "grpc_stream": (GrpcSource, GrpcSink),
    "socket": (SocketSource, SocketSink),
    "ucx": (UcxSource, UcxSink),
    "mooncake": (Mooncake, Mooncake),
}


class Role:
    """Answers of one process that has a pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.pace = pool, Pace(spin=pool.spin)
        self.name = ""
        self.kind: Any = Nothing(pool)

    def answer(self, words: dict[str, Any]) -> Any:
        op = words.pop("op")
        if op == "usage":
            return {"cpu_s": time.process_time()}
        if op == "close":
            self.kind.close()
            self.kind = Nothing(self.pool)
            return {}
        return self.open(**words) if op == "open" else self.read(**words)

    def open(self, kind: str, devices: Sequence[str], **at: Any) -> Any:
        try:
            self.name, self.kind = kind, KINDS[kind][self.pool.role == "sink"](self.pool, devices, **at)
        except (ImportError, OSError) as error:
            return {"absent": f"{type(error).__name__}: {error}"}
        return self.kind.endpoint

    def read(self, local: list[int], remote: list[int], repeats: int, *, verify: bool) -> dict[str, Any]:
        pool, order = self.pool, (local, remote)
        if verify:
            pool.memory.array.fill(0)
        self.kind.read((local[:WARM_PAGES], remote[:WARM_PAGES]))
        cpu_s = time.process_time()
        took = [self.kind.read(order) for _ in range(repeats)]
        cpu_s = time.process_time() - cpu_s
        places = self.places(order)
        return {
            "seconds": [seconds for _, seconds in took],
            "post_s": [seconds for seconds, _ in took],
            "cpu_s": cpu_s,
            "bytes": len(local) * pool.here.page_bytes,
            "descriptors": 1 if self.name == "nixl_largest" else len(places),
            "wrong": pool.wrong(places) if verify else 0,
        }

    def places(self, order: Order) -> list[tuple[Span, int]]:
        """Spans that were read into, each with the address of what has to be there."""
        pool = self.pool
        if self.name != "nixl_largest":
            return list(zip(pool.here.spans(order[0]), pool.contents(order[1]), strict=True))
        # the start of the source's region, as it is laid out there
        pages, end = range(pool.there.pages), len(order[0]) * pool.there.page_bytes
        region = zip(pool.there.spans(pages), pool.contents(pages), strict=True)
        return [(span, content) for span, content in region if sum(span) <= end]

    def rest(self) -> float | None:
        """Between two looks at the input; None: until there is some."""
        return self.pace.after(self.kind.poll) if self.kind.polled else None


class Lines:
    """Of the input."""

    def __init__(self, fd: int) -> None:
        self.fd, self.held = fd, b""

    def next(self, rest: Callable[[], float | None]) -> bytes:
        """Empty at the end; while there is none, `rest` says how long to wait until it is asked again."""
        while b"\n" not in self.held:
            if select.select([self.fd], [], [], rest())[0]:
                some = os.read(self.fd, 1 << 20)
                if not some:
                    return b""
                self.held += some
        line, _, self.held = self.held.partition(b"\n")
        return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("source", "sink"))
    parser.add_argument("--listen", metavar="HOST:PORT", default="")
    options = parser.parse_args()
    # libraries that print must not be taken for an answer
    asked, told = 0, os.dup(1)
    os.dup2(2, 1)
    if options.listen:
        host, _, port = options.listen.rpartition(":")
        with socket.create_server((host, int(port))) as listener:
            print("listening at", "{}:{}".format(*listener.getsockname()), file=sys.stderr, flush=True)
            asked = told = listener.accept()[0].detach()
    asks = Lines(asked)
    with os.fdopen(told, "w") as out:
        pool = json.loads(asks.next(lambda: None))
        role = Role(Pool(options.role, pool))
        said: object = {"pid": os.getpid(), "address": role.pool.memory.address}
        print(json.dumps(said), file=out, flush=True)
        while line := asks.next(role.rest):
            print(json.dumps(role.answer(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
