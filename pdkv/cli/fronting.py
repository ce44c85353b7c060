"""Gives a router or a decode node its HTTP front, if one was asked for.

Guarantees: without an address nothing of it is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdkv.config import HttpConfig
from pdkv.errors import MissingDependency
from pdkv.node.readiness import Readiness

if TYPE_CHECKING:
    from pdkv.http.front import Generating, HttpFront


def front_of(config: HttpConfig, service: Generating, readiness: Readiness) -> HttpFront | None:
    """To be called in the loop that will serve. Raises `MissingDependency`, `ConfigError`."""
    if not config.http_bind:
        return None
    try:
        from pdkv.http.front import HttpFront, HttpSettings
    except ImportError as error:
        raise MissingDependency("aiohttp", "http_bind", extra="http", detail=str(error)) from error
    from pdkv.http.tokenizer import tokenizer_named

    settings = HttpSettings(
        bind=config.http_bind,
        models=config.http_models,
        api_keys=config.http_api_keys,
        body_bytes=config.http_body_bytes,
        request_s=config.http_request_s,
    )
    tokenizer = tokenizer_named(config.http_tokenizer)
    return HttpFront(service, settings, tokenizer, readiness, config.security(), config.gate())
