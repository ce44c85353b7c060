"""One trace of a request over all processes that have a part in it.

`span` is what the code that serves tells of, whoever listens; `otel` is who listens: OpenTelemetry, where it was asked
for. See docs/tracing.md.
"""
