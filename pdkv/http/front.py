"""The HTTP port: `POST /v1/completions`, `GET /v1/models`, `GET /health`.

Guarantees: a request ends when its client goes away, its time is over or the service ends, and with it everything that
runs for it on other nodes; one that a stop string ends is finished there, and not aborted; a status is sent only when
the first token is there, so what fails before has its own; what fails after is the stream's last event; a client that
reads slowly holds one answer's next part; a request that runs is one whose answer the system hasn't taken whole, so
whoever waits until none does cuts none, and one that is cut is named in the log; sizes, times and connections are
bounded; whatever bytes come, only their connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from pdkv.errors import ConfigError, Draining, FieldRefused, PdkvError, UnknownModel, UnknownRequest
from pdkv.http import answers
from pdkv.http.access import Access, ApiKeys
from pdkv.http.answers import Answer, spoken
from pdkv.http.connections import Connections
from pdkv.http.failures import error_object, failure_of
from pdkv.http.intake import Intake
from pdkv.http.question import Question, columns_of, question_in
from pdkv.http.speech import Speech
from pdkv.http.tls import serving
from pdkv.http.tokenizer import Tokenizer
from pdkv.http.tracing import traced
from pdkv.ids import RequestId
from pdkv.node.flow import deadline
from pdkv.node.messages import GenerateDone, GenerateEvent, GenerateRequest
from pdkv.node.readiness import Readiness
from pdkv.rpc.convert.checks import STREAM_SLACK_S
from pdkv.rpc.security import Gate, KeyFiles, MutualTls, Security, connection_age_s
from pdkv.tracing.span import tracer

log = logging.getLogger(__name__)

HEADER_BYTES = 8190
HEADERS = 64
IDLE_S = 75.0
"""A connection without a request, a new one too, is closed after so long."""
BODY_S = 60.0
STALL_S = 60.0
"""A client that takes nothing of its answer for so long is hung up on."""
HANDSHAKE_S = 10.0
FINISH_S = 5.0
"""For a node to end a request whose answer has met a stop string; then it is aborted, and its client has its answer."""
LAST_WORDS_S = 1.0
"""For an error to be written to a client that may not read."""
WIRE = logging.getLogger(f"{__name__}.wire")
WIRE.setLevel(logging.CRITICAL)
"""What aiohttp says of requests that are none: anybody can make it say that, as often as they like."""

COMPLETIONS = "/v1/completions"
PATHS = "POST /v1/completions, GET /v1/models, GET /v1/models/NAME, GET /health"
BEGUN = web.RequestKey("begun", web.StreamResponse)
"""Key of a request whose answer is being streamed."""
TOLD = web.RequestKey("told", bool)
"""Key of a request that the service itself has failed: its own line in the log says so."""
WHOLE = web.RequestKey("whole", bool)
"""Key of a request whose answer's last part is on its way: nothing may follow it."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Generating(Protocol):
    """A router or a decode node."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]: ...
    async def finish(self, request: RequestId, output_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True)
class HttpSettings:
    bind: str
    """host:port; port 0: any free one."""
    models: Sequence[str]
    api_keys: str = ""
    """Path of a file of keys; empty: none is asked for."""
    body_bytes: int = 32 << 20
    request_s: float = 600.0
    """Longest that a request may take."""
    body_s: float = BODY_S
    stall_s: float = STALL_S
    idle_s: float = IDLE_S


class HttpFront:
    """Listens from `start` to `stop`."""

    def __init__(
        self,
        service: Generating,
        settings: HttpSettings,
        tokenizer: Tokenizer,
        readiness: Readiness,
        security: Security,
        gate: Gate,
    ) -> None:
        """Raises `ConfigError` for files that can't be used."""
        self._service = service
        self._settings = settings
        self._tokenizer = tokenizer
        self._readiness = readiness
        self._connections = Connections(gate.connections, connection_age_s(gate, security))
        keys = ApiKeys(Path(settings.api_keys)) if settings.api_keys else None
        self._access = Access(gate, keys)
        self._tls: ssl.SSLContext | None = None
        if isinstance(security, MutualTls):
            self._tls = serving(KeyFiles(security, "serve"), certificates=keys is None)
        self._intake = Intake(settings.body_bytes, settings.body_s)
        self._created = int(time.time())
        self._tracer = tracer()
        self._running: set[asyncio.Task[Any]] = set()
        self._last_word: PdkvError | None = None
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    async def start(self) -> str:
        """Returns host:port once it listens. Raises `ConfigError` if that can't be had."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            with self._connections.busy(request.transport):
                return await self._guarded(request, handler)

        app = web.Application(middlewares=[guarded])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._model)
        app.router.add_post(COMPLETIONS, self._completions)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=WIRE,
            shutdown_timeout=LAST_WORDS_S,
            auto_decompress=False,
            keepalive_timeout=self._settings.idle_s,
            lingering_time=LAST_WORDS_S,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            max_headers=HEADERS,
        )
        await self._runner.setup()
        host, _, port = self._settings.bind.rpartition(":")
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: self._connections.accept(self._server),
                host.strip("[]"),
                int(port),
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls is not None else None,
            )
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError("http_bind", self._settings.bind, f"an address that is free here ({error})") from error
        for listening in self._listener.sockets:
            # Of every connection that it accepts: the kernel counts from when the client last made room.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._settings.stall_s * 1000))
        return f"{host}:{self._listener.sockets[0].getsockname()[1]}"

    async def drain(self) -> None:
        """Connections end, those with a request after its answer; what comes from then on is refused. What has come
        by now has begun when this returns, and is the service's to take or refuse."""
        await self._connections.drain(self._server)

    async def ended(self) -> None:
        """Returns when no request runs, and all answers are written."""
        while running := set(self._running):
            await asyncio.wait(running)

    async def stop(self, error: PdkvError) -> None:
        """Requests that run end now, with `error`, and every connection after them."""
        self._last_word = error
        if self._listener is not None:
            self._listener.close()
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def _server(self) -> web.Server | None:
        return self._runner.server if self._runner is not None else None

    # --- what is asked ----------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.StreamResponse:
        why = "draining" if self._connections.draining else self._readiness.unready
        return web.json_response({"status": why or "ok"}, status=503 if why else 200)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        with self._let_in(request):
            return web.json_response(answers.models(self._settings.models, self._created))

    async def _model(self, request: web.Request) -> web.StreamResponse:
        with self._let_in(request):
            name = request.match_info["name"]
            if name not in self._settings.models:
                raise UnknownModel(name[:80], self._settings.models)
            return web.json_response(answers.model(name, self._created))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if self._connections.refusing:
            raise Draining("this service is draining")
        with self._let_in(request), traced(self._tracer, request, COMPLETIONS):
            async with self._intake.body(request) as raw:
                question = question_in(raw, self._settings.models)
                if isinstance(question.prompt, str):
                    tokens = await asyncio.to_thread(self._tokenizer.encode, question.prompt)
                else:
                    tokens = columns_of(question.prompt)
                number = f"cmpl-{secrets.token_hex(12)}"
                asked = question.request(number, tokens, self._tokenizer.stop_tokens, self._settings.request_s)
            answer = Answer(
                number,
                question.body.model,
                int(time.time()),
                len(tokens),
                shows_ids=bool(question.body.return_token_ids) or not self._tokenizer.speaks,
            )
            return await self._answered(request, question.without_prompt(), asked, answer)

    async def _answered(
        self, request: web.Request, question: Question, asked: GenerateRequest, answer: Answer
    ) -> web.StreamResponse:
        speech = Speech(self._tokenizer.decoder(), question.stops, asked.sampling.stop_tokens)
        limit_s = asked.remaining_s + STREAM_SLACK_S
        async with deadline(limit_s, "the request"), aclosing(self._service.generate(asked)) as events:
            texts = spoken(events, speech, answer, partial(self._finish, asked.request_id, events))
            try:
                async with aclosing(texts):
                    if question.body.stream:
                        return await self._streamed(request, question, answer, texts)
                    said = "".join([text async for text in texts])
            except PdkvError:
                request[TOLD] = True
                raise
        return web.json_response(answer.said(said, usage=True))

    async def _finish(
        self, request: RequestId, events: AsyncGenerator[GenerateEvent, None], tokens: int
    ) -> GenerateDone | None:
        """The account of a request whose answer is enough after `tokens`; None if it had to be left without one."""
        done = None
        try:
            async with deadline(FINISH_S, "ending the request behind an answer that met a stop string"):
                with suppress(UnknownRequest):  # it has just come to its end by itself
                    await self._service.finish(request, tokens)
                async for event in events:
                    done = event if isinstance(event, GenerateDone) else done
        except PdkvError as error:
            log.warning("%s has its answer, and its end is not known: %s: %s", request, error.kind, error)
        return done

    async def _streamed(
        self, request: web.Request, question: Question, answer: Answer, texts: AsyncGenerator[str, None]
    ) -> web.StreamResponse:
        usage = False if question.usage else None
        first = await anext(texts)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        self._connections.prepare(request, response)
        await response.prepare(request)
        request[BEGUN] = response
        await response.write(answers.event(answer.said(first, usage=usage)))
        async for text in texts:
            if text or answer.ids or answer.reason:
                await response.write(answers.event(answer.said(text, usage=usage)))
        if question.usage:
            await response.write(answers.event(answer.usage_alone()))
        request[WHOLE] = True
        await response.write(answers.LAST)
        return response

    # --- around it --------------------------------------------------------------------------------------------------

    @contextmanager
    def _let_in(self, request: web.Request) -> Iterator[None]:
        transport = request.transport
        certificate = transport.get_extra_info("peercert") if transport is not None else None
        with self._access.let_in(request.headers, certificate or None, request.remote or ""):
            yield

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors as OpenAI's clients expect them: with a status, or as the last event of a stream that has begun."""
        try:
            with self._counted():
                response = await handler(request)
                await self._written(request, response)
        except PdkvError as error:
            response = await _failed(request, error)
        except web.HTTPException as refused:
            asked = f"{request.method} {request.path[:80]!r}"
            response = await _failed(request, FieldRefused("path", asked, PATHS), refused.status)
        except ConnectionError:
            raise  # the client has gone: aiohttp knows what to do
        except Exception:
            log.exception("%s %r failed", request.method, request.path)
            response = await _failed(request, PdkvError("the request failed; the service's log says more"))
        self._connections.prepare(request, response)
        return response

    async def _written(self, request: web.Request, response: web.StreamResponse) -> None:
        """Returns when the system has all of it, which sends it whatever becomes of this process."""
        if request.transport is not None:
            request.transport.set_write_buffer_limits(0)
        if not response.prepared:
            self._connections.prepare(request, response)
            request[WHOLE] = True
            await response.prepare(request)
        await response.write_eof()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Raises the front's last word, if it has said it, in place of the cancellation that came with it."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("requests run inside a task")
        if self._last_word is not None:
            raise self._last_word
        self._running.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._last_word is None:
                raise
            task.uncancel()
            raise self._last_word from None
        finally:
            self._running.discard(task)


async def _failed(request: web.Request, error: PdkvError, status: int | None = None) -> web.StreamResponse:
    """The answer to a request that failed; `status` in place of the error's own."""
    begun: web.StreamResponse | None = request.get(BEGUN)
    if WHOLE in request:
        raise _cut(request, error)
    if begun is None:
        failure = failure_of(error)
        if TOLD not in request:  # without the error's words, which may repeat what was sent
            log.info("%s %r of %s: %d %s", *_asked(request), failure.status, error.kind)
        response = web.Response(status=status or failure.status, body=failure.body, headers=failure.headers)
        if request.can_read_body and not request.content.is_eof():
            response.force_close()  # the rest of its body is not waited for
        return response
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            await begun.write(answers.event(error_object(error)))
    except (TimeoutError, ConnectionError) as failed:
        raise _cut(request, error) from failed
    begun.force_close()
    return begun


def _cut(request: web.Request, error: PdkvError) -> ConnectionError:
    """An answer that isn't whole must not look as if it were: its connection is broken."""
    log.warning("%s %r of %s is cut in its answer: %s: %s", *_asked(request), error.kind, error)
    if request.transport is not None:
        request.transport.abort()
    return ConnectionError("cut")


def _asked(request: web.Request) -> tuple[str, str, str | None]:
    return request.method, request.path, request.remote
