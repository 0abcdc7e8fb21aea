"""Spans: what a collector of OpenTelemetry gets of a request, and that one which is away costs nothing else."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from api import telemetry
from api.options import ServerConfig
from api.telemetry import PACKAGES, Complaints, check_telemetry
from scripted import BODIES, BROKEN, CHAT, COMPLETIONS, FACTS, TOKENIZER, ScriptedClient, client_of, post, told
from served import eventually, serving
from test_logs import read

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER_KIND, FAILED = 2, 2  # of the protocol


class Collector:
    """Takes spans by HTTP. Each is a dict of its fields, with its attributes and its resource's."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service

        self.spans: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.headers.append(dict(self.headers) | {"path": self.path})
                collector.take(trace_service.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def take(self, request: Any) -> None:
        def plain(attributes: Any) -> dict[str, Any]:
            return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}

        for of_resource in request.resource_spans:
            resource = plain(of_resource.resource.attributes)
            for span in [span for scope in of_resource.scope_spans for span in scope.spans]:
                self.spans.append({
                    "name": span.name, "kind": span.kind, "trace": span.trace_id.hex(), "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(), "begin": span.start_time_unix_nano,
                    "end": span.end_time_unix_nano, "status": span.status.code, "why": span.status.message,
                    "resource": resource, **plain(span.attributes),
                })  # fmt: skip

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.05,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture
def told_to(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes clients of an app whose spans go to the collector, and then sends them there."""
    made: list[telemetry.Spans] = []
    monkeypatch.setattr("scripted.create_app", with_spans(collector, made))
    yield lambda: made[-1].provider.force_flush()
    for spans in made:
        spans.provider.shutdown()
    logging.getLogger("opentelemetry").handlers.clear()


def with_spans(collector: Collector, made: list[telemetry.Spans]) -> Any:
    from server import create_app

    def create(api: Any) -> Any:
        made.append(telemetry.Spans(collector.url))
        return create_app(api, made[-1])

    return create


@pytest.mark.full
def test_a_request_is_a_span_below_its_callers(engine: ScriptedClient, collector: Collector, told_to: Any) -> None:
    http_client = client_of(engine)
    ask = BODIES[COMPLETIONS] | {"n": 2, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "stream": True}
    read(http_client.post(COMPLETIONS, json=ask, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}))
    told_to()
    (span,) = collector.named("llm_request")
    assert (span["kind"], span["trace"], span["parent"], span["status"]) == (SERVER_KIND, TRACE, PARENT, 0)
    assert span["resource"]["service.name"] == "manta" and span["gen_ai.request.id"].startswith("cmpl-")
    wanted = {
        "gen_ai.request.max_tokens": 3, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 2, "gen_ai.usage.prompt_tokens": len(TOKENIZER.encode("To be")),
        "gen_ai.usage.completion_tokens": 6, "gen_ai.response.model": "manta", "http.response.status_code": 200,
    }  # fmt: skip
    assert {name: span[name] for name in wanted} == pytest.approx(wanted)
    seconds = {name: span[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")}
    assert 0 <= seconds["time_in_queue"] <= seconds["time_to_first_token"] <= seconds["e2e"]
    assert seconds["e2e"] == pytest.approx((span["end"] - span["begin"]) / 1e9, abs=1e-4)
    phases = [collector.named(name)[0] for name in ("queue", "prefill", "decode")]
    assert {(phase["trace"], phase["parent"]) for phase in phases} == {(TRACE, span["id"])}
    times = [span["begin"], *(time for phase in phases for time in (phase["begin"], phase["end"])), span["end"]]
    assert times == sorted(times)
    inference = sum(span[f"gen_ai.latency.time_in_model_{name}"] for name in ("prefill", "decode"))
    assert span["gen_ai.latency.time_in_model_inference"] == pytest.approx(inference, abs=1e-4)
    assert "To be" not in str(collector.spans) and "Hello" not in str(collector.spans)


@pytest.mark.full
def test_how_a_request_ended_is_the_spans_status(engine: ScriptedClient, collector: Collector, told_to: Any) -> None:
    http_client = client_of(engine)
    for script, stream, status in (([BROKEN], False, 503), ([told([5]), BROKEN], True, 200)):
        engine.script = script
        assert read(post(http_client, COMPLETIONS, stream=stream)).status_code == status
    engine.script = None
    read(post(http_client, CHAT, temperature=-1))  # never reaches the engine
    read(http_client.get("/health"))
    read(post(http_client, CHAT, max_tokens=1))
    told_to()
    spans = collector.named("llm_request")
    assert [(span["status"], span["why"]) for span in spans] == [(FAILED, "worker died")] * 2 + [(0, "")]
    assert len({span["trace"] for span in spans}) == 3 and not any(span["parent"] for span in spans)


@pytest.mark.full
def test_a_pooled_request_is_a_span(engine: ScriptedClient, collector: Collector, told_to: Any) -> None:
    embedder = client_of(engine, FACTS | {"task": "embed", "vector_size": 3})
    assert read(embedder.post("/v1/embeddings", json={"input": ["To be", "or"]})).status_code == 200
    told_to()
    (span,) = collector.named("llm_request")
    ids = [TOKENIZER.encode(text) for text in ("To be", "or")]
    assert (span["gen_ai.usage.prompt_tokens"], span["gen_ai.usage.completion_tokens"]) == (sum(map(len, ids)), 0)
    assert not [name for name in span if name.startswith("gen_ai.request.") and name != "gen_ai.request.id"]
    assert len(collector.named("queue")) == len(collector.named("prefill")) == 1 and not collector.named("decode")


def test_what_cannot_be_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "find_spec", lambda name: name)  # installed or not
    check_telemetry({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        with pytest.raises(ValueError, match=f"^{name} is 'grpc'; it must be http/protobuf$"):
            check_telemetry({name: "grpc"})
    for url in ("localhost:4318", "http://", "grpc://localhost:4317", ""):
        with pytest.raises(ValueError, match=r"^otlp_traces_endpoint is .*; it must be like http://localhost:4318/v1"):
            ServerConfig(otlp_traces_endpoint=url)


@pytest.mark.parametrize("missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http", "all"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def find_spec(name: str) -> object:
        if missing == "all":
            raise ModuleNotFoundError(name)
        return None if name == missing else name

    monkeypatch.setattr(telemetry, "find_spec", find_spec)
    with pytest.raises(ValueError, match=f"pip install {PACKAGES}$"):
        check_telemetry({})


def test_complaints_are_few(caplog: pytest.LogCaptureFixture) -> None:
    theirs = logging.Logger("opentelemetry")
    theirs.addHandler(Complaints())
    for i in range(3):
        theirs.info("well")
        theirs.error(f"no {i}")
    assert caplog.messages == ["OpenTelemetry: no 0"]


def ask(port: int) -> int:
    """The status of a request that keeps its connection open, as clients do."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    connection.request("POST", COMPLETIONS, '{"prompt": "Once", "max_tokens": 4}', parent)
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


@pytest.mark.full
def test_a_server_sends_its_spans_before_it_ends(tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch):
    """Though the next batch is not due yet, and a connection is still open."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    flags = ("--threads", "1", "--otlp-traces-endpoint", collector.url)
    with serving(tmp_path, *flags) as server, contextlib.closing(HTTPConnection("127.0.0.1", server.port)) as idle:
        idle.request("GET", "/version")
        idle.getresponse().read()
        assert ask(server.port) == 200 and not collector.spans
        server.process.terminate()
        assert server.process.wait(30) == 0
    (span,) = collector.named("llm_request")
    assert (span["trace"], span["parent"], span["resource"]["service.name"]) == (TRACE, PARENT, "mine")
    assert span["gen_ai.usage.completion_tokens"] == 4 and len(collector.spans) == 4
    assert collector.headers[0]["path"] == "/v1/traces" and collector.headers[0]["x-token"] == "abc"


@pytest.mark.full
def test_a_collector_that_is_away_costs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    flags = ("--threads", "1", "--otlp-traces-endpoint", "http://127.0.0.1:1/v1/traces")
    with serving(tmp_path, *flags) as server:
        for _ in range(20):
            assert ask(server.port) == 200
        eventually(lambda: "OpenTelemetry: " in server.log.read_text(), 20)
        assert ask(server.port) == 200
        server.process.terminate()
        assert server.process.wait(30) == 0
    log = server.log.read_text()
    assert log.count("OpenTelemetry: ") == 1 and "Traceback" not in log and "ERROR" not in log
