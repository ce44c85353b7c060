"""What UCX itself says about the lanes it uses, without a line on the process's own output.

Guarantees: a lane is read from UCX's own table of the protocol it selected for reads, never guessed from a setting or
a speed; the log goes to a file that only this process reads and that has no name any more once UCX has opened it; the
environment is as before afterwards. UCX's warnings are passed on to `logging`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pdkv.transfer.backends.base import UNKNOWN_LANE, Lane, Memory

logger = logging.getLogger(__name__)

AGENT_CHARS = 31
"""UCX keeps so many characters of a worker's name."""
WARNINGS_AT_ONCE = 3
_READS = "*remote memory read*"
"""UCX_PROTO_INFO takes a pattern over the tables' titles: only those of reads are written."""
_RDMA = re.compile(r"(rc|dc|gga|srd)(_|$)")
_EMULATED = "software emulation"
"""The target sends the bytes; they are copied only while their request is known here."""
_COPIED_BY_CALLER = frozenset({"cma", "knem", "posix", "self", "sysv", "xpmem"})
"""The reader's own thread copies the bytes: none are under way when the call is over."""
_MEMORY: dict[Memory, str] = {"DRAM": "host", "VRAM": "cuda"}
# "| node#0123 intra-node cfg#1    |" and, in the next line, "| remote memory read by ucp_get*(multi) into host ... |"
_TITLE = re.compile(r"\|\s+(?P<agent>\S+) .*cfg#(?P<config>\d+)\s+\|$")
_READ = re.compile(r"\|\s+remote memory read by \S+ into (?P<memory>\w+)")
_ROW = re.compile(r"\|\s+\S*\.\.inf \| (?P<how>.*?) \| (?P<lanes>.*?)\s*\|$")
_LANE = re.compile(r"([a-z]\w*)/([\w.:-]+)")


@dataclass(frozen=True, slots=True)
class ReadTable:
    """UCX's choice for long reads of one agent over one endpoint configuration."""

    agent: str
    """At most `AGENT_CHARS` characters of the agent's name."""
    config: int
    memory: str
    how: str
    """As "zero-copy" or "software emulation"."""
    lanes: str
    """As "cma/memory", "tcp/eth0", "52% on rc_mlx5/mlx5_0:1 and 48% on rc_mlx5/mlx5_1:1"."""

    def lane(self) -> Lane:
        transports = list(dict.fromkeys(name for name, _ in _LANE.findall(self.lanes)))
        if not transports:
            return UNKNOWN_LANE
        emulated = self.how == _EMULATED
        copied = not emulated and _COPIED_BY_CALLER.issuperset(transports)
        return Lane(
            name="+".join(transports),
            detail=f"{self.how} {self.lanes}",
            rdma=not emulated and all(_RDMA.match(t) for t in transports),
            ends_clean=emulated or copied,
            copied=copied,
        )


def read_tables(lines: Iterable[str]) -> list[ReadTable]:
    """All tables of reads in a UCX log, in order."""
    found: list[ReadTable] = []
    agent, config, memory = "", -1, ""
    for line in lines:
        if title := _TITLE.search(line):
            agent, config, memory = title["agent"], int(title["config"]), ""
        elif read := _READ.search(line):
            memory = read["memory"]
        elif memory and (row := _ROW.search(line)):
            found.append(ReadTable(agent, config, memory, row["how"].strip(), row["lanes"].strip()))
    return found


class UcxLog:
    """UCX's log of this process. UCX opens it once, when its library is loaded."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._partial = b""
        self._table_lines: list[str] = []
        self._deaf = bool(_ucs_library())
        """The library was loaded before us: its log goes elsewhere."""

    @contextmanager
    def listening(self, settings: Mapping[str, str]) -> Iterator[None]:
        """Around loading UCX and making a UCX backend: its settings are read from the environment then.

        These are added; what the operator has set stays. A log file of the operator's is read if it is a file;
        otherwise (as with "stdout") lanes stay unknown.
        """
        settings = dict(settings)
        path = _expand(os.environ.get("UCX_LOG_FILE", ""))
        own = self._file is None and not self._deaf and not path
        if own:
            handle, path = tempfile.mkstemp(prefix="pdkv-ucx-")
            os.close(handle)
            settings["UCX_LOG_FILE"] = path
        if not self._deaf and path not in ("stdout", "stderr"):
            settings["UCX_PROTO_INFO"] = _READS
        added = {k: v for k, v in settings.items() if k not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for key in added:
                os.environ.pop(key, None)
            # not loaded yet, the library will look again
            if self._file is None and not self._deaf and _ucs_library() and Path(path).is_file():
                self._file = os.open(path, os.O_RDONLY)
            if own:
                Path(path).unlink(missing_ok=True)

    def tables(self, agent: str, memory: Memory) -> list[ReadTable]:
        """Tables of this agent's reads into memory of that kind, one an endpoint configuration, in order."""
        self.catch_up()
        wanted = (agent[:AGENT_CHARS], _MEMORY[memory])
        return [t for t in read_tables(self._table_lines) if (t.agent, t.memory) == wanted]

    def catch_up(self) -> None:
        """Read what is new; warnings go to `logging`."""
        if self._file is None:
            return
        library = _ucs_library()
        if library:
            ctypes.CDLL(library).ucs_log_flush()
        new = self._partial + b"".join(iter(partial(os.read, self._file, 1 << 16), b""))
        *complete, self._partial = new.split(b"\n")
        lines = [line.decode(errors="replace") for line in complete]
        warnings = [line for line in lines if " UCX  WARN " in line or " UCX  ERROR " in line]
        for line in warnings[:WARNINGS_AT_ONCE]:
            logger.warning("%s", line.split(" UCX  ", 1)[1].strip())
        if len(warnings) > WARNINGS_AT_ONCE:
            logger.warning("and %d more warnings of UCX", len(warnings) - WARNINGS_AT_ONCE)
        self._table_lines += [line for line in lines if "|" in line]


def _ucs_library() -> str:
    """Path of the UCX library that is loaded in this process, or nothing."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split()[-1]
            if os.path.basename(path).startswith("libucs") and ".so" in path and "signal" not in path:
                return path
    return ""


def _expand(pattern: str) -> str:
    """The parts of UCX's file name patterns that can be followed."""
    return pattern.replace("%p", str(os.getpid())).replace("%h", socket.gethostname())
