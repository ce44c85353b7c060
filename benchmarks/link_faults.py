"""A link between two network namespaces that is slow, goes down under a transfer and comes back: what requests see.

    python benchmarks/link_faults.py [--mbit 40] [--only link,rails] [--json]

One prefill node stands in a namespace of its own, behind a veth pair that `tc tbf` shapes; a decode node and a second
prefill node stay outside. Then both sides have two rails, and a third link for gRPC. Needs Linux, root, and `ip` and
`tc` (iproute2). Everything it made is gone afterwards.

Exit code 0 only if each case ended as it has to: on a slow link the right tokens; with the link down, under `fail` a
named error, under `retry` and `recompute` the right tokens; with the link up again the right tokens, and no page held.
With one rail of two down under a transfer the right tokens, even under `fail`; the node says that the rail is down, and
after the link has come up that it is up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.netns import NotPossible, TwoSpaces  # noqa: E402
from pdkv.cli.demo.asks import text_tokens  # noqa: E402
from pdkv.cli.demo.fleet import command  # noqa: E402
from pdkv.cli.demo.reference import Reference  # noqa: E402
from pdkv.config import PrefillConfig  # noqa: E402
from pdkv.errors import PdkvError  # noqa: E402
from pdkv.ids import RequestId  # noqa: E402
from pdkv.node.messages import FailurePolicy, GenerateDone, GenerateRequest, NodeStatus, Sampling  # noqa: E402
from pdkv.rpc.client import GrpcDirectory  # noqa: E402
from pdkv.rpc.security import PlainText  # noqa: E402

CHUNK, LENGTH = 512, 2500
SAMPLING = Sampling(max_tokens=8)
LIMIT_S = 90.0
NODE = {"model": "tiny", "threads": 1, "insecure": True, "ucx_tls": "tcp", "log_level": "warning"}
DECODE = {"fence_after_s": 3, "recompute_chunk_tokens": CHUNK}
"""Steps of equal shapes on all nodes, so that answers can be compared token by token."""


@dataclass(frozen=True)
class Row:
    case: str
    policy: str
    ended: str
    """"right", "wrong", or the error's kind."""
    due: str
    seconds: float
    ok: bool


@asynccontextmanager
async def node(role: str, name: str, prefix: list[str], **flags: str | int | bool) -> AsyncIterator[str]:
    """A node's address, as long as the body runs."""
    line = [*prefix, *command(role, name, {**NODE, **flags})]
    process = await asyncio.create_subprocess_exec(*line, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        said = await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
        yield json.loads(said)["address"]
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


class Fleet:
    def __init__(self, link: TwoSpaces, far: str, near: str, decode: str) -> None:
        self.link = link
        self.far, self.near, self.decode = far, near, decode
        self.directory = GrpcDirectory(PlainText())
        self.reference = Reference(PrefillConfig(model="tiny", chunk_tokens=CHUNK, threads=1))
        self.rows: list[Row] = []
        self._asked = 0

    async def case(self, case: str, policy: FailurePolicy, due: str, *, cut: int | None = None) -> None:
        """One new prompt; link `cut` goes down while its pages travel."""
        self._asked += 1
        tokens, began = text_tokens(70_000 + self._asked, LENGTH), time.monotonic()
        alternates = (self.near,) if policy is FailurePolicy.RETRY else ()
        request = GenerateRequest(
            RequestId(f"link-{self._asked}"),
            tokens,
            SAMPLING,
            prefill_address=self.far,
            prefill_alternates=alternates,
            on_failure=policy,
            remaining_s=LIMIT_S,
        )
        asking = asyncio.create_task(self._ask(request))
        if cut is not None:
            await self._travelling(asking)
            self.link.set("down", cut)
        try:
            said = await asking
            ended = "right" if said == (await self.reference.ask(tokens, SAMPLING)).tokens else "wrong"
        except PdkvError as error:
            ended = error.kind
        seconds = time.monotonic() - began
        self.rows.append(Row(case, policy.value, ended, due, round(seconds, 2), ended in due.split("|")))

    async def _ask(self, request: GenerateRequest) -> tuple[int, ...]:
        said: list[int] = []
        async with aclosing(self.directory.decode(self.decode).generate(request)) as events:
            async for event in events:
                if not isinstance(event, GenerateDone):
                    said.append(event.token)
        return tuple(said)

    async def _travelling(self, asking: asyncio.Task[tuple[int, ...]]) -> None:
        """Until decode has pages of it, and not all."""
        before = (await self._status()).pages["cached"]
        while (await self._status()).pages["cached"] == before and not asking.done():
            await asyncio.sleep(0.02)

    async def _status(self) -> NodeStatus:
        return await self.directory.decode(self.decode).status()

    async def rail(self, device: str, due: str) -> None:
        """What decode says of its rail, "up" or "down", in good time."""
        began, state = time.monotonic(), ""
        while state != due and time.monotonic() - began < LIMIT_S:
            state = "down" if "down to" in (await self._status()).rails[device] else "up"
            await asyncio.sleep(0.1)
        seconds = round(time.monotonic() - began, 2)
        self.rows.append(Row("what decode says of that rail", "", state, due, seconds, state == due))

    async def at_rest(self) -> None:
        """No page held on any node, in good time."""
        began, held = time.monotonic(), -1
        while held and time.monotonic() - began < LIMIT_S:
            states = [await self._status()]
            states += [await self.directory.peer(address).status() for address in (self.far, self.near)]
            held = sum(s.pages["total"] - s.pages["free"] - s.pages["cached"] for s in states)
            await asyncio.sleep(0.1 if held else 0.0)
        seconds = round(time.monotonic() - began, 2)
        self.rows.append(Row("nothing is held any more", "", f"{held} pages", "0 pages", seconds, held == 0))


async def run(mbit: int) -> list[Row]:
    with TwoSpaces(mbit=mbit, near_here=True) as link:
        here, there = link.links[0].near_address, link.links[0].far_address
        flags = {"chunk_tokens": CHUNK, "lease_ttl_s": 5}
        async with (
            node("prefill", "far", link.far.prefix, bind=f"{there}:7000", **flags) as far,
            node("prefill", "near", [], bind=f"{here}:0", **flags) as near,
            node("decode", "d", [], bind=f"{here}:0", **DECODE, prefill_addresses=f"{far},{near}") as decode,
        ):
            fleet = Fleet(link, far, near, decode)
            try:
                await fleet.case("slow link", FailurePolicy.FAIL, "right")
                for policy, due in (
                    (FailurePolicy.FAIL, "PeerLost|TransferUnsettled|LeaseExpired"),
                    (FailurePolicy.RETRY, "right"),
                    (FailurePolicy.RECOMPUTE, "right"),
                ):
                    await fleet.case("link down under the transfer", policy, due, cut=0)
                    link.set("up")
                    await fleet.case("link up again", FailurePolicy.RETRY, "right")
                await fleet.at_rest()
            finally:
                fleet.reference.close()
                await fleet.directory.close()
            return fleet.rows


async def run_rails(mbit: int) -> list[Row]:
    with TwoSpaces(links=3, mbit=mbit, near_here=True) as link:
        control, *rails = link.links
        near, far = (",".join(devices) for devices in zip(*((r.near_device, r.far_device) for r in rails), strict=True))
        flags = {"chunk_tokens": CHUNK, "lease_ttl_s": 5}
        async with (
            node("prefill", "far", link.far.prefix, bind=f"{control.far_address}:7000", rails=far, **flags) as prefill,
            node(
                "decode", "d", [], bind=f"{control.near_address}:0", rails=near, **DECODE, prefill_addresses=prefill
            ) as decode,
        ):
            fleet = Fleet(link, prefill, prefill, decode)
            try:
                await fleet.case("two rails", FailurePolicy.FAIL, "right")
                for cut in (1, 2):
                    device = link.links[cut].near_device
                    await fleet.case(f"rail {cut} down under the transfer", FailurePolicy.FAIL, "right", cut=cut)
                    await fleet.rail(device, "down")
                    link.set("up", cut)
                    await fleet.rail(device, "up")
                    await fleet.case(f"rail {cut} up again", FailurePolicy.FAIL, "right")
                await fleet.at_rest()
            finally:
                fleet.reference.close()
                await fleet.directory.close()
            return fleet.rows


SCENARIOS = {"link": run, "rails": run_rails}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=40, help="rate of the link, 10^6 bit/s (default 40)")
    parser.add_argument("--only", default="link,rails", help="which of these, with a comma between (default: both)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    try:
        rows = [row for name in options.only.split(",") for row in asyncio.run(SCENARIOS[name](options.mbit))]
    except NotPossible as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    ok = all(row.ok for row in rows)
    if options.json:
        print(json.dumps({"mbit": options.mbit, "cpus": os.cpu_count(), "rows": [asdict(r) for r in rows], "ok": ok}))
    else:
        for row in rows:
            print(f"{'ok ' if row.ok else 'BAD'} {row.case:32} {row.policy:10} {row.ended:20} {row.seconds:7.2f} s")
    raise SystemExit(0 if ok else 1)


if __name__ == "__main__":
    main()
