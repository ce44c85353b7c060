"""`pdkv generate`: a client of a decode node or a router.

Guarantees: tokens are shown as they come; a refusal or failure is one line on stderr and exit code 2, never silence.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import sys
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdkv.cli.client import ClientOptions, options_command
from pdkv.cli.tracing import traced
from pdkv.cli.whom import known_as, wait_for
from pdkv.errors import ConfigError, PeerLost
from pdkv.tracing.span import begun, trace_of

if TYPE_CHECKING:
    from pdkv.ids import UInt32Array
    from pdkv.node.messages import FailurePolicy, GenerateDone, GenerateRequest, Sampling
    from pdkv.node.ports import DecodeService
    from pdkv.rpc.security import Security

_BYTES = 256
"""The presets' vocabulary is the bytes; other models' prompts come as token ids."""
_MAX_TOKENS = 1 << 22
"""The most that a request can ask for."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ClientOptions):
    """The command line, one field an option."""

    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt's text (byte-level), or @FILE: text, or JSON token ids if it ends in .json.",
        ),
    ]
    decode: Annotated[str, typer.Option(metavar="HOST:PORT", help="Of a decode node.")] = ""
    router: Annotated[str, typer.Option(metavar="HOST:PORT", help="Of a router; one of the two.")] = ""
    max_tokens: Annotated[int, typer.Option(min=1, max=_MAX_TOKENS, metavar="N", help="Tokens to generate.")] = 16
    sample: Annotated[
        str,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Keys: temperature, top_p, seed; the same tokens on any node. Without it greedy.",
        ),
    ] = ""
    priority: Annotated[
        int,
        typer.Option(
            min=-(1 << 31),
            max=(1 << 31) - 1,
            metavar="N",
            help="The higher, the longer its pages stay, on nodes with --eviction priority.",
        ),
    ] = 0
    on_failure: Annotated[
        str,
        typer.Option(
            metavar="fail|retry|recompute",
            help="If a prefill node takes the request on and fails it: end, ask another one for what is missing, or"
            " compute that on the decode node. Without it as router or node are set.",
        ),
    ] = ""
    wait: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Wait first until the node or router says SERVING, so long at most."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="One JSON object at the end, with the account.")] = False
    trace_endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Begin a trace, and send its span there over OTLP/gRPC, such as http://collector:4317. Without it as"
            " OpenTelemetry's own variables say, or none.",
        ),
    ] = ""

    @property
    def address(self) -> str:
        return self.decode or self.router


HELP = """Generate from a running fleet and stream the tokens.

**Examples**

`pdkv generate "Once upon a page" --decode 127.0.0.1:7001 --max-tokens 32 --insecure`

`pdkv generate @prompt.txt --router 127.0.0.1:8000 --wait 60 --sample temperature=0.8,seed=1 --insecure`
"""


def run_generate(options: GenerateOptions) -> None:
    if bool(options.decode) == bool(options.router):
        raise ConfigError("--decode, --router", f"{options.decode!r}, {options.router!r}", "exactly one of the two")
    if options.wait is not None and not 0 < options.wait < math.inf:
        raise ConfigError("wait", options.wait, "a number of seconds above 0")
    policy = _policy(options.on_failure)
    security = options.security()
    request = _request(options.prompt, _sampling(options.sample, options.max_tokens), options.priority)
    try:
        with traced(options.trace_endpoint, 1.0, service="pdkv-generate", instance=request.request_id):
            asyncio.run(_generate(options, security, replace(request, on_failure=policy)))
    except KeyboardInterrupt:
        print("pdkv: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


generate = options_command(GenerateOptions, run_generate, HELP)


def _policy(name: str) -> FailurePolicy | None:
    from pdkv.node.messages import FailurePolicy

    if name and name not in list(FailurePolicy):
        raise ConfigError("on_failure", name, ", ".join(FailurePolicy))
    return FailurePolicy(name) if name else None


def _sampling(text: str, max_tokens: int) -> Sampling:
    from pdkv.node.messages import Sampling

    kinds = {"temperature": float, "top_p": float, "seed": int}
    values: dict[str, float | int] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ConfigError("sample", part, ", ".join(f"{k}=…" for k in kinds))
        try:
            values[name] = kinds[name](value)
        except ValueError as error:
            raise ConfigError(f"sample.{name}", value, f"of type {kinds[name].__name__}") from error
    return Sampling(
        max_tokens=max_tokens,
        temperature=float(values.get("temperature", 0.0)),
        top_p=float(values.get("top_p", 1.0)),
        seed=int(values.get("seed", 0)),
    )


def _request(prompt: str, sampling: Sampling, priority: int) -> GenerateRequest:
    from pdkv.ids import RequestId
    from pdkv.node.messages import GenerateRequest

    tokens = _tokens(prompt)
    if not len(tokens):
        raise ConfigError("prompt", prompt, "at least one token")
    return GenerateRequest(RequestId(secrets.token_hex(8)), tokens, sampling, priority=priority)


def _tokens(prompt: str) -> UInt32Array:
    import numpy as np

    if prompt.startswith("@"):
        try:
            raw = Path(prompt[1:]).read_bytes()
        except OSError as error:
            raise ConfigError("prompt", prompt, f"a readable file ({error.strerror})") from error
    else:
        raw = prompt.encode()
    if not (prompt.startswith("@") and prompt.endswith(".json")):
        return np.frombuffer(raw, np.uint8).astype(np.uint32)
    try:
        ids = json.loads(raw)
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError("not a list of whole numbers")
        return np.array(ids, np.uint32)
    except (ValueError, OverflowError, TypeError) as error:
        raise ConfigError("prompt", prompt, f"a JSON list of token ids, whole numbers from 0 on ({error})") from error


async def _generate(options: GenerateOptions, security: Security, request: GenerateRequest) -> None:
    from pdkv.node.messages import GenerateDone
    from pdkv.rpc.client import GrpcDirectory

    directory = GrpcDirectory(security)
    service: DecodeService = directory.decode(options.decode) if options.decode else directory.router(options.router)
    tokens: list[int] = []
    done: GenerateDone | None = None
    try:
        if options.wait is not None:
            await wait_for(directory, options.address, security, options.wait)
        with begun("pdkv.generate") as span:
            trace = trace_of(span)
            flag = "--decode" if options.decode else "--router"
            whom = known_as(directory, options.address, flag)
            async with whom, aclosing(service.generate(request)) as events:
                async for event in events:
                    if isinstance(event, GenerateDone):
                        done = event
                    else:
                        tokens.append(event.token)
                        if not options.json:
                            sys.stdout.write(_shown(event.token))
                            sys.stdout.flush()
    finally:
        await directory.close()
    if done is None:
        raise PeerLost("the stream ended without a last word", address=options.address)
    _say(tokens, done) if not options.json else print(json.dumps(_object(tokens, done)))
    if trace:
        print(f"trace {trace}", file=sys.stderr)


def _shown(token: int) -> str:
    """A byte as its character where it is a printable one of ASCII; other tokens by number."""
    if token < _BYTES and (32 <= token < 127 or token in b"\n\t"):
        return chr(token)
    return f"<{token}>"


def _object(tokens: list[int], done: GenerateDone) -> dict[str, object]:
    answer = {"tokens": tokens, "finish_reason": done.finish_reason, **asdict(done.shipment)}
    answer |= {"retries": done.retries, "recomputed_tokens": done.recomputed_tokens}
    if drafts := done.speculation:
        answer["speculation"] = {**asdict(drafts), "mean_accepted_length": drafts.mean_accepted_length}
    return answer


def _say(tokens: list[int], done: GenerateDone) -> None:
    s = done.shipment
    print(
        f"\n{len(tokens)} tokens ({done.finish_reason}); prompt {s.prompt_tokens} tokens in {s.pages_total} pages:"
        f" {s.pages_hit} hit, {s.pages_shipped} shipped ({(s.bytes_main + s.bytes_index) / 1e6:.2f} MB),"
        f" {s.digests_verified} digests verified, first token after {s.ttft_s:.3f} s",
        file=sys.stderr,
    )
    if done.retries or done.recomputed_tokens:
        print(
            f"a prefill node failed it: {done.retries} more asked, {done.recomputed_tokens} tokens computed by decode",
            file=sys.stderr,
        )
    if drafts := done.speculation:
        print(
            f"{drafts.accepted} of {drafts.drafted} drafts accepted in {drafts.steps} steps,"
            f" {drafts.rolled_back_tokens} tokens rolled back, {drafts.mean_accepted_length:.2f} tokens a step"
            + (f"; suspicious: {drafts.canary}" if drafts.canary else ""),
            file=sys.stderr,
        )
