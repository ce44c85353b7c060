"""The scheduler's half: which prompts are to be loaded or held, and what a response says about it.

Guarantees: does no I/O and waits for nothing; the parameters that come with a request and go with a response are
NixlConnector's; a request is loaded once at most; what can't be loaded is computed here, as if nobody had asked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdkv.adapters.vllm.orders import Hold, Load, Prompt, Remote, StepOrders, remote_of, token_column

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
    def lora_name(self) -> str: ...


class Request(Protocol):
    """vLLM's, as far as it is needed."""

    request_id: str
    prompt_token_ids: list[int] | None
    prompt_embeds: object | None
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


class SchedulerSide:
    """Of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next = StepOrders()

    def matched(self, request: Request, computed_tokens: int) -> int:
        """Tokens that another engine has computed beyond those that this one has."""
        if self._remote(request) is None:
            return 0
        return max(len(_tokens(request)) - computed_tokens, 0)

    def allocated(self, request: Request, blocks: Sequence[int], external_tokens: int) -> None:
        """`blocks` are all of the request's; the last `external_tokens` of its prompt are to be loaded into theirs."""
        remote = self._remote(request)
        if remote is None or request.kv_transfer_params is None:
            return
        request.kv_transfer_params["do_remote_prefill"] = False
        self._load(request, remote, blocks if external_tokens else (), external_tokens)

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
            if (remote := self._remote(request)) is not None:
                params["do_remote_prefill"] = False
                self._load(request, remote, (), 0)
            return False, None
        pages = -(-len(_tokens(request)) // self._engine.block_tokens)
        if not params.get("do_remote_decode") or not completed or not pages or len(blocks) < pages:
            return False, None
        held = tuple(blocks[:pages])
        self._next.holds.append(Hold(request.request_id, prompt_of(request), held))
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

    def _load(self, request: Request, remote: Remote, blocks: Sequence[int], external_tokens: int) -> None:
        tokens = len(_tokens(request))
        first = (tokens - external_tokens) // self._engine.block_tokens
        pages = -(-tokens // self._engine.block_tokens)
        self._next.loads.append(
            Load(request.request_id, prompt_of(request), tuple(blocks[first:pages]), first, remote.host, remote.port)
        )

    def _remote(self, request: Request) -> Remote | None:
        """Where the request's prompt was computed, if it was somewhere else, and that can be used."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill") or not _tokens(request):
            return None
        remote = remote_of(params)
        if isinstance(remote, str):
            log.warning("request %s: its prompt is computed here, as %s", request.request_id, remote)
            return None
        if remote.tp_size != self._engine.tp_size:
            log.warning(
                "request %s: its prompt is computed here, as tp_size is %d there and %d here",
                request.request_id,
                remote.tp_size,
                self._engine.tp_size,
            )
            return None
        return remote


def prompt_of(request: Request) -> Prompt:
    """What names the request's pages, also where its tokens are only placeholders for something else."""
    items = [(f.mm_position.offset, f.mm_position.length, f.identifier) for f in request.mm_features]
    lora = request.lora_request
    key = f"lora {lora.lora_name}" if lora is not None else ""
    return Prompt(token_column(_tokens(request), items), key, request.cache_salt or "")


def _tokens(request: Request) -> list[int]:
    """That name its pages. None do where some stand for embeddings: those are in no name."""
    return request.prompt_token_ids or [] if request.prompt_embeds is None else []
