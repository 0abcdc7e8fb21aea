"""A span of each request that the engine ran, for collectors of OpenTelemetry: `--otlp-traces-endpoint`.

OpenTelemetry's packages are imported only where spans are wanted. The exporter runs in a thread of its own, which
gevent makes a greenlet, and reads its settings from OTEL_EXPORTER_OTLP_* and OTEL_BSP_*.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from werkzeug.datastructures import Headers

from api.generation import LEFT, EngineCall
from observe.logs import Repeated

PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
PROTOCOL = "http/protobuf"


def check_telemetry(environ: Mapping[str, str]) -> None:
    """Check that spans can be made, without importing what makes them: gevent must patch the sockets before that.

    A ValueError says which packages are missing, or that `environ` asks for a protocol other than PROTOCOL.
    """
    try:
        installed = find_spec("opentelemetry.sdk.trace") and find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        installed = None
    if not installed:
        raise ValueError(f"otlp_traces_endpoint is given; it needs packages: pip install {PACKAGES}")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (protocol := environ.get(name, PROTOCOL)) != PROTOCOL:
            raise ValueError(f"{name} is {protocol!r}; it must be {PROTOCOL}")


class Complaints(logging.Handler):
    """Logs what OpenTelemetry complains of, but not all the time: a collector may be away for days."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.repeated = Repeated()

    def emit(self, record: logging.LogRecord) -> None:
        self.repeated.warn(f"OpenTelemetry: {record.getMessage()[:500]}")


class Spans:
    """Sends spans to a collector at a URL. One that cannot be reached costs spans, and nothing else."""

    def __init__(self, endpoint: str):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        theirs = logging.getLogger("opentelemetry")
        theirs.propagate, theirs.handlers = False, [Complaints()]
        named = OTELResourceDetector().detect().attributes  # by OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        resource = Resource.create({"service.name": "manta"} | dict(named))
        # At its end the process does not wait for a collector; it has been flushed by then.
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self.tracer = self.provider.get_tracer("manta")

    def add(self, call: EngineCall[Any], headers: Headers, status: int, begun: float) -> None:
        """Send the span of a request that has just ended, and came when it was `begun` by `time.monotonic()`.

        Its parent is the span that the header `traceparent` names, if any.
        """
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now, offset = time.monotonic(), time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return offset + int(seconds * 1e9)

        parent = TraceContextTextMapPropagator().extract(headers)
        span = self.tracer.start_span("llm_request", parent, SpanKind.SERVER, start_time=at(begun))
        span.set_attributes(attributes(call, begun, now) | {"http.response.status_code": status})
        if call.error not in ("", LEFT) and not 400 <= status < 500:  # those are the client's
            span.set_status(StatusCode.ERROR, call.error)
        inside = set_span_in_context(span)
        for name, (since, until) in phases(call, now).items():
            self.tracer.start_span(name, inside, start_time=at(since)).end(at(until))
        span.end(at(now))


def attributes(call: EngineCall[Any], begun: float, now: float) -> dict[str, Any]:
    """The attributes of a request's span, by vLLM's names; times are in seconds."""
    facts, params, ran = call.facts(begun), call.requests[0].params, phases(call, now)
    values = {
        "gen_ai.request.id": call.id,
        "gen_ai.response.model": facts["model"],
        "gen_ai.usage.prompt_tokens": facts["prompt_tokens"],
        "gen_ai.usage.completion_tokens": facts["output_tokens"],
        "gen_ai.latency.time_in_queue": facts["queue_seconds"],
        "gen_ai.latency.time_to_first_token": facts["first_token_seconds"],
        "gen_ai.latency.e2e": now - begun,
    }
    for name in ("prefill", "decode"):
        if name in ran:
            values[f"gen_ai.latency.time_in_model_{name}"] = ran[name][1] - ran[name][0]
            values["gen_ai.latency.time_in_model_inference"] = ran[name][1] - ran["prefill"][0]
    if call.requests[0].pooling is None:
        for name in ("max_tokens", "temperature", "top_p", "n"):
            values[f"gen_ai.request.{name}"] = getattr(params, name)
    return {name: value for name, value in values.items() if value is not None}


def phases(call: EngineCall[Any], now: float) -> dict[str, tuple[float, float]]:
    """From when until when a call waited, had its prompts computed and was answered, as far as it has come.

    The first of several prompts begins each phase but the second, which begins when all have been let in.
    """
    metrics = [request.metrics for request in call.requests]
    queued = [times.time_in_queue for times in metrics if times.time_in_queue is not None]
    if not queued:
        return {}
    sent, ends = min(times.arrival_time for times in metrics), [times.finished_time or now for times in metrics]
    let_in = sent + max(queued)
    first = min((at for times in metrics if (at := times.first_token_time) is not None), default=max(ends))
    spans = {"queue": (sent, let_in), "prefill": (let_in, max(first, let_in))}
    return spans | ({"decode": (first, max(ends))} if call.endings else {})
