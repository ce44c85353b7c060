"""What a LoRA adapter is in the names of pages: the content of its files, and how the engine takes them.

Guarantees: two adapters have one key only if their files are equal, byte by byte, whatever they are called and wherever
they lie; files that have changed since they were named are refused: which of the two the engine has loaded, and which
it loads when it has put the adapter out, nobody can say. Reads files: not for an engine's step.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pdkv.adapters.vllm.orders import Adapter
from pdkv.errors import ConfigError

FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""All that vLLM reads of an adapter."""

_State: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""(name, inode, bytes, time of the last change) of each file."""


@dataclass(frozen=True, slots=True)
class _Known:
    state: _State
    content: str


class Adapters:
    """Of one worker; used by one thread."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def key(self, adapter: Adapter) -> str:
        """Raises `ConfigError` for a directory without an adapter, or with another one than before."""
        directory = Path(adapter.directory)
        state = _state(directory)
        known = self._known.get(adapter.directory)
        if known is None:
            known = self._known[adapter.directory] = _Known(state, _content(directory, state))
        if known.state != state:
            words = "files as they were when it was first used: a new version goes into a directory of its own"
            raise ConfigError("LoRA adapter", adapter.directory, words)
        return f"lora {known.content} {adapter.taken_as}"


def _state(directory: Path) -> _State:
    try:
        found = [(path.name, path.stat()) for path in (directory / name for name in FILES) if path.is_file()]
    except OSError as error:
        raise ConfigError("LoRA adapter", str(directory), f"a directory that can be read: {error}") from error
    if len(found) < 2:
        raise ConfigError("LoRA adapter", str(directory), f"a directory with {FILES[0]} and weights")
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in found)


def _content(directory: Path, state: _State) -> str:
    """32 hex digits; the whole of each file is read, once in a worker's life."""
    running = hashlib.sha256()
    try:
        for name, *_ in state:
            with (directory / name).open("rb") as file:
                running.update(name.encode() + hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise ConfigError("LoRA adapter", str(directory), f"files that can be read: {error}") from error
    return running.hexdigest()[:32]
