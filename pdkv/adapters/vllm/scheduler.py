"""The scheduler's half: which prompts are to be loaded or held, and what a response says about it.

Guarantees: does no I/O and waits for nothing; the parameters that come with a request and go with a response are
NixlConnector's; a request is loaded once at most; what can't be loaded is computed here, as if nobody had asked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdkv.adapters.vllm.orders import Adapter, Hold, Load, Prompt, Remote, StepOrders, remote_of, token_column

log = logging.getLogger(__name__)


class Span(Protocol):
    offset: int
    length: int


class Feature(Protocol):
    """An item of another modality in a prompt."""

    @property
    def identifier(self) -> str: ...
    @property
    def mm_position(self) -> Span: ...


class Lora(Protocol):
    @property
    def lora_path(self) -> str: ...
    @property
    def load_inplace(self) -> bool: ...
    @property
    def is_3d_lora_weight(self) -> bool: ...


class Request(Protocol):
    """vLLM's, as far as it is needed."""

    request_id: str
    prompt_token_ids: list[int] | None
    prompt_embeds: object | None
    num_computed_tokens: int
    kv_transfer_params: dict[str, Any] | None
    cache_salt: str | None
    lora_request: Lora | None
    mm_features: Sequence[Feature]


@dataclass(frozen=True, slots=True)
class Engine:
    """What the scheduler has to know of its own engine."""

    engine_id: str
    host: str
    port: int
    """Of its first worker."""
    tp_size: int
    block_tokens: int
    lora_dtype: str = ""


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A prompt that another engine has computed."""

    remote: Remote
    adapter: Adapter | None


class SchedulerSide:
    """Of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next = StepOrders()

    def matched(self, request: Request, computed_tokens: int) -> int:
        """Tokens that another engine has computed beyond those that this one has."""
        if self._elsewhere(request) is None:
            return 0
        return max(len(_tokens(request)) - computed_tokens, 0)

    def allocated(self, request: Request, blocks: Sequence[int], external_tokens: int) -> None:
        """`blocks` are all of the request's; the last `external_tokens` of its prompt are to be loaded into theirs."""
        if (elsewhere := self._elsewhere(request)) is not None:
            self._load(request, elsewhere, blocks if external_tokens else (), external_tokens)

    def finished(
        self, request: Request, blocks: Sequence[int], *, completed: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks have to stay, and what the response tells the other engine. `completed`: it was neither
        aborted nor failed; `blocks` hold what was computed."""
        params = request.kv_transfer_params
        if not params:
            return False, None
        if params.get("do_remote_prefill"):
            # it never got as far as blocks: the other engine needn't wait
            if (elsewhere := self._elsewhere(request)) is not None:
                self._load(request, elsewhere, (), 0)
            return False, None
        pages = -(-len(_tokens(request)) // self._engine.block_tokens)
        if not params.get("do_remote_decode") or not completed or not pages or len(blocks) < pages:
            return False, None
        adapter, why = self._adapter(request), self._outgrown(request, pages)
        if isinstance(adapter, str) or why:
            log.warning("request %s: its prompt isn't kept for others, as %s", request.request_id, why or adapter)
            return False, None
        held = tuple(blocks[:pages])
        self._next.holds.append(Hold(request.request_id, prompt_of(request, adapter), held))
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(held)],
            "remote_engine_id": self._engine.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self._engine.host,
            "remote_port": self._engine.port,
            "remote_num_tokens": len(_tokens(request)),
            "tp_size": self._engine.tp_size,
        }

    def orders(self) -> StepOrders:
        """Of this step: all since the last one."""
        orders, self._next = self._next, StepOrders()
        return orders

    def _load(self, request: Request, elsewhere: _Elsewhere, blocks: Sequence[int], external_tokens: int) -> None:
        _settled(request)
        tokens, remote = len(_tokens(request)), elsewhere.remote
        first = (tokens - external_tokens) // self._engine.block_tokens
        pages = -(-tokens // self._engine.block_tokens)
        prompt = prompt_of(request, elsewhere.adapter)
        self._next.loads.append(
            Load(request.request_id, prompt, tuple(blocks[first:pages]), first, remote.host, remote.port)
        )

    def _elsewhere(self, request: Request) -> _Elsewhere | None:
        """Where the request's prompt was computed, if it was somewhere else, and that can be used. What can't be is
        said once: vLLM asks at every step for as long as the request waits."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill") or not _tokens(request):
            return None
        remote, adapter = remote_of(params), self._adapter(request)
        if isinstance(remote, str):
            why = remote
        elif isinstance(adapter, str):
            why = adapter
        elif remote.tp_size != self._engine.tp_size:
            why = f"tp_size is {remote.tp_size} there and {self._engine.tp_size} here"
        else:
            return _Elsewhere(remote, adapter)
        _settled(request)
        log.warning("request %s: its prompt is computed here, as %s", request.request_id, why)
        return None

    def _outgrown(self, request: Request, pages: int) -> str:
        """Why the prompt's last block is another page by now, or "": one that the answer has filled is in vLLM's
        prefix cache, and goes into the next prompt under that prompt's name. A block has one name at a time."""
        filled = len(_tokens(request)) < pages * self._engine.block_tokens <= request.num_computed_tokens
        return "its answer has filled its last block: for another engine, one token is enough" if filled else ""

    def _adapter(self, request: Request) -> Adapter | str | None:
        """The request's LoRA adapter; or why pages can't be named by it. A path that isn't absolute may be a name on a
        hub for vLLM, and nobody here can say what is there now."""
        lora = request.lora_request
        if lora is None:
            return None
        if not lora.lora_path.startswith("/"):
            return f"its LoRA adapter is at {lora.lora_path!r}, which is no absolute path"
        if lora.load_inplace:
            return f"its LoRA adapter at {lora.lora_path!r} was loaded in place of another one"
        layout = "3d" if lora.is_3d_lora_weight else "2d"
        return Adapter(lora.lora_path, f"{layout} {self._engine.lora_dtype}")


def prompt_of(request: Request, adapter: Adapter | None) -> Prompt:
    """What names the request's pages, also where its tokens are only placeholders for something else."""
    items = [(f.mm_position.offset, f.mm_position.length, f.identifier) for f in request.mm_features]
    return Prompt(token_column(_tokens(request), items), request.cache_salt or "", adapter)


def _settled(request: Request) -> None:
    """Where its prompt comes from isn't asked again."""
    if request.kv_transfer_params is not None:
        request.kv_transfer_params["do_remote_prefill"] = False


def _tokens(request: Request) -> list[int]:
    """That name its pages. None do where some stand for embeddings: those are in no name."""
    return request.prompt_token_ids or [] if request.prompt_embeds is None else []
