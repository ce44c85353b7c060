"""When a process traces, by its settings and by OpenTelemetry's own variables."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from pdkv.cli.tracing import ENDPOINTS, asked_by, traced
from pdkv.config import PrefillConfig, RouterConfig
from pdkv.errors import ConfigError, MissingDependency
from pdkv.resolve import resolve
from pdkv.tracing.span import tracer
from tests.tracing.receiver import receiving

HERE = {ENDPOINTS[1]: "http://collector:4317"}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, False),
        (HERE, True),
        ({ENDPOINTS[0]: "http://collector:4317"}, True),
        ({**HERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True),
        ({**HERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, False),
        ({**HERE, "OTEL_SDK_DISABLED": "true"}, False),
        ({**HERE, "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_variables_of_others_are_heeded(environ: Mapping[str, str], asked: bool) -> None:
    assert asked_by(environ) is asked


def test_only_what_is_asked_for_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    with traced("", 1.0, service="s", instance="i"):
        assert tracer() is None
    with receiving() as (receiver, endpoint):
        with traced(endpoint, 1.0, service="s", instance="i"):
            made = tracer()
            assert made is not None
            made.begin("named", {}, "server", root=True).end()
        assert tracer() is None
        monkeypatch.setenv(ENDPOINTS[1], endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "theirs")
        with traced("", 1.0, service="s", instance="i"):
            made = tracer()
            assert made is not None
            made.begin("by variable", {}, "server", root=True).end()
        assert [(span.name, span.service) for span in receiver.spans] == [("named", "s"), ("by variable", "theirs")]


def test_what_is_missing_is_an_error_only_where_it_was_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "pdkv.tracing.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    with pytest.raises(MissingDependency, match=r"\.\[tracing\]"), traced("http://c:1", 1.0, service="s", instance="i"):
        pass
    monkeypatch.setenv(ENDPOINTS[1], "http://c:1")
    with traced("", 1.0, service="s", instance="i"):
        assert tracer() is None
    assert "no traces: tracing needs opentelemetry" in caplog.text


@pytest.mark.parametrize("cls", [PrefillConfig, RouterConfig])
def test_settings_name_what_they_take(cls: type[PrefillConfig | RouterConfig]) -> None:
    needed = {name: "a:1" for name, info in cls.model_fields.items() if info.is_required()}
    for url in ("http://collector:4317", "https://10.0.0.1:4317/", ""):
        assert resolve(cls, {**needed, "trace_endpoint": url}, environ={}).trace_endpoint == url
    for url in ("collector:4317", "http://collector", "ftp://collector:4317", "http://a:1/v1/traces"):
        with pytest.raises(ConfigError) as refused:
            resolve(cls, {**needed, "trace_endpoint": url}, environ={})
        assert refused.value.fields["allowed"] == "http://host:port, or https://host:port"
    with pytest.raises(ConfigError):
        resolve(cls, {**needed, "trace_ratio": "1.5"}, environ={})
