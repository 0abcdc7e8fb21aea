"""What is counted, against a plain count of the same; the series that Prometheus reads; and the dashboard's queries."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser

from api.options import ServerConfig
from engine import LLM
from fake_worker import Engine, prompt
from observe.metrics import SERIES, Histogram, token_bounds
from observe.prometheus import exposition
from processes.child import Board
from sampling_params import SamplingParams
from scripted import ScriptedClient, client_of
from served import ROOT, Server, eventually, serving

DEPLOY = ROOT / "docs" / "deploy"
LATENCIES = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
BETWEEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
STEPS = "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0"
TOKENS = "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0 1000.0"  # where the context has 1,024
# vLLM's series that Manta has: type, label beside model_name and engine, bounds. From vllm/v1/metrics/loggers.py.
VLLM = {
    "num_requests_running": ("gauge", "", ""),
    "num_requests_waiting": ("gauge", "", ""),
    "num_requests_waiting_by_reason": ("gauge", "reason", ""),
    "kv_cache_usage_perc": ("gauge", "", ""),
    "prefix_cache_queries": ("counter", "", ""),
    "prefix_cache_hits": ("counter", "", ""),
    "num_preemptions": ("counter", "", ""),
    "prompt_tokens": ("counter", "", ""),
    "generation_tokens": ("counter", "", ""),
    "request_success": ("counter", "finished_reason", ""),
    "iteration_tokens_total": ("histogram", "", STEPS),
    "time_to_first_token_seconds": ("histogram", "", FIRST),
    "inter_token_latency_seconds": ("histogram", "", BETWEEN),
    "request_time_per_output_token_seconds": ("histogram", "", BETWEEN),
    "e2e_request_latency_seconds": ("histogram", "", LATENCIES),
    "request_queue_time_seconds": ("histogram", "", LATENCIES),
    "request_inference_time_seconds": ("histogram", "", LATENCIES),
    "request_prefill_time_seconds": ("histogram", "", LATENCIES),
    "request_decode_time_seconds": ("histogram", "", LATENCIES),
    "request_prompt_tokens": ("histogram", "", TOKENS),
    "request_generation_tokens": ("histogram", "", TOKENS),
    "request_max_num_generation_tokens": ("histogram", "", TOKENS),
    "request_params_n": ("histogram", "", "1.0 2.0 5.0 10.0 20.0"),
    "request_params_max_tokens": ("histogram", "", TOKENS),
    "request_prefill_kv_computed_tokens": ("histogram", "", TOKENS),
    "request_num_preemptions": ("histogram", "", "1.0 2.0 3.0 4.0 5.0 10.0 20.0"),
}


def families(text: str) -> dict[str, Any]:
    """The parsed series, by name; each name is there once."""
    found = list(parser.text_string_to_metric_families(text))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def test_vllms_series_have_its_names_types_labels_and_buckets(llm: LLM) -> None:
    series = families(exposition({"demo": {0: llm.get_metrics()}}, {}, "vllm:").decode())
    for name, (kind, label, bounds) in VLLM.items():
        family = series["vllm:" + name]
        assert family.type == kind and family.documentation, name
        labels = {"model_name", "engine"} | ({label} if label else set())
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, name
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("demo", "0")
        listed = [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
        assert listed == ([*bounds.split(), "+Inf"] if bounds else []), name
    reasons = [sample.labels["finished_reason"] for sample in series["vllm:request_success"].samples]
    assert reasons == ["stop", "length", "abort", "error"]
    (cache,) = series["vllm:cache_config_info"].samples
    assert cache.value == 1 and cache.labels["engine"] == "0" and cache.labels["block_size"] == "64"
    assert cache.labels["num_gpu_blocks"] == str(llm.core.facts["num_blocks"])


def test_the_adapters_of_requests_are_told_with_the_time() -> None:
    """As in vLLM, where of several lines the latest one counts."""
    labels = {"max_lora": "1", "waiting_lora_adapters": "", "running_lora_adapters": "sing,whisper"}
    before = time.time()
    text = exposition({"demo": {0: {"lora_requests_info": labels}}}, {}, "vllm:").decode()
    (sample,) = families(text)["vllm:lora_requests_info"].samples
    assert sample.labels == labels | {"engine": "0"} and before <= sample.value <= time.time()


def test_each_engine_has_its_values_under_one_head() -> None:
    histogram = {"bounds": [0.1, 2.5], "counts": [3, 0, 4], "sum": 41.5}
    engines = {rank: {"prompt_tokens_total": rank + 5, "e2e_request_latency_seconds": histogram} for rank in (0, 2)}
    text = exposition({'a "b"': engines}, {}, "").decode()
    lines = text.splitlines()
    assert sum(line.startswith("# TYPE") for line in lines) == sum(line.startswith("# HELP") for line in lines) == 3
    assert lines[2:4] == [
        'prompt_tokens_total{engine="0",model_name="a \\"b\\""} 5.0',
        'prompt_tokens_total{engine="2",model_name="a \\"b\\""} 7.0',
    ]
    samples = families(text)["e2e_request_latency_seconds"].samples
    assert [sample.value for sample in samples if sample.labels["engine"] == "2"] == [3, 3, 7, 7, 41.5]


def test_the_names_keep_their_colon_whatever_format_the_reader_likes_best(engine: ScriptedClient) -> None:
    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    response = client_of(engine, metrics_prefix="vllm:").get("/metrics", headers=accept)
    assert response.content_type == "text/plain; version=0.0.4; charset=utf-8"
    samples = [sample.name for family in families(response.text).values() for sample in family.samples]
    assert samples == ["vllm:num_requests_running", "vllm:prompt_tokens_total"]


def test_all_http_requests_are_counted_by_route_and_status(engine: ScriptedClient) -> None:
    http_client = client_of(engine, api_key=("key",), max_queue=1, max_body_bytes=1024)
    key = {"X-Api-Key": "key"}
    longest = max((rule.rule for rule in http_client.application.url_map.iter_rules()), key=len)
    assert len(f"404 {longest}") < Board.MOST_NAME
    for body in ({"prompt": "a"}, {"prompt": ["a", "b"]}, {"prompt": 1}, {"prompt": "a" * 2000}):
        http_client.post("/v1/completions", json=body, headers=key)
    http_client.post("/v1/completions", json={"prompt": "a"})
    for path in ("/ready", "/a", "/b", "/v1/models/nope", "/v1/models/manta", "/health"):
        http_client.get(path, headers=key)
    engine.trouble = "the engine process has ended"
    http_client.get("/health")
    samples = families(http_client.get("/metrics", headers=key).text)["manta_http_requests"].samples
    assert {(sample.labels.pop("route"), sample.labels.pop("status")): sample.value for sample in samples} == {
        **{("/v1/completions", status): 1 for status in ("200", "400", "401", "413", "429")},
        ("none", "404"): 3, ("/v1/models/<path:name>", "404"): 1, ("/v1/models/<path:name>", "200"): 1,
        ("/health", "200"): 1, ("/health", "503"): 1,
    }  # fmt: skip
    assert not any(sample.labels for sample in samples)


def test_api_processes_count_together_and_for_those_that_are_gone() -> None:
    board = Board()
    for age, names in ((1, "aab"), (2, "ba"), (1 + board.PLACES, "ac")):  # the last one gets the place of the first
        board.claim(age)
        for name in names:
            board.count(name)
        board.clear(age)
    board.count("200 /" + "x" * 100)
    assert board.counted() == {"a": 4, "b": 2, "c": 1, "200 /" + "x" * 59: 1}


@pytest.mark.parametrize("prefix", ["2x_", "a-b", "a b", "ä_", "a\n"])
def test_a_prefix_that_makes_no_name_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match=r"metrics_prefix is .* letters, digits, _ and :"):
        ServerConfig(metrics_prefix=prefix)


def test_a_value_is_counted_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5):
        histogram.observe(value)
    histogram.observe(7, times=3)
    assert histogram.plain() == {"bounds": [1, 2, 5], "counts": [2, 2, 1, 3], "sum": 30.5}
    assert token_bounds(1) == (1,) and token_bounds(49) == (1, 2, 5, 10, 20) and token_bounds(50)[-1] == 50


# --- in the scheduler ------------------------------------------------------------------------------------------------


class Watched(Engine):
    """A scheduler whose clock goes on by some 64ths of a second before each step, and when each token came."""

    def __init__(self, seed: int, **fields: Any):
        super().__init__(**fields)
        self.random = random.Random(seed)
        self.times: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.arrivals: dict[str, float] = {}

    def arrive(self, name: str, length: int, **params: Any) -> None:
        group = self.add(name, prompt(length, self.random.randrange(3)), **params).group
        group.delay = self.random.randrange(20) / 64
        self.arrivals[name] = self.now - group.delay

    def turn(self) -> None:
        """A step, or the end of one."""
        self.now += self.random.randrange(1, 30) / 64
        if self.scheduler.has_work():
            self.step()
        elif self.flying:
            self.land()
        for name, answers in self.answers.items():
            for index, tokens in answers.items():
                times = self.times[name, index]
                times += [self.now] * (len(tokens) - len(times))

    def traffic(self, aborts: bool) -> None:
        """Requests that come and go."""
        for i in range(60):
            for _ in range(self.random.randrange(3)):
                name = f"{i}-{self.random.random()}"
                output = self.random.choice((1, 2, 9, 20))
                samples = self.random.choice((1, 1, 1, 3))
                self.arrive(name, self.random.randrange(1, 30), max_tokens=output, n=samples)
            self.turn()
            if aborts and i % 7 == 6 and self.scheduler.requests:
                self.scheduler.abort(self.random.choice(list(self.scheduler.requests)))
        while self.scheduler.has_work() or self.flying:
            self.turn()

    def counted(self, name: str) -> Histogram:
        return self.scheduler.stats.histograms[name]

    def check(self, name: str, values: list[float]) -> None:
        """The histogram is that of these values."""
        told, expected = self.counted(name), Histogram(self.counted(name).bounds)
        for value in values:
            expected.observe(value)
        assert told.counts == expected.counts and told.sum == pytest.approx(expected.sum), name


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3))])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 24}, {"depth": 2}, {"enable_chunked_prefill": False}], ids=str)
def test_times_are_those_that_a_watch_shows(options: dict[str, Any], seed: int) -> None:
    classic = {"max_num_batched_tokens": 64} if "enable_chunked_prefill" in options else {}
    engine = Watched(seed, **options, **classic)
    engine.traffic(aborts=True)
    assert (engine.scheduler.counters["num_preemptions_total"] > 3) == ("num_blocks" in options)
    firsts = [(name, times[0]) for (name, _), times in engine.times.items() if times]
    assert len(firsts) > 40
    engine.check("time_to_first_token_seconds", [at - engine.arrivals[name] for name, at in firsts])
    gaps = [after - before for times in engine.times.values() for before, after in pairwise(times)]
    assert len(gaps) > 200
    engine.check("inter_token_latency_seconds", gaps)


def test_the_parts_of_a_request_add_up() -> None:
    engine = Watched(5, num_blocks=24)
    engine.traffic(aborts=False)
    ended = {key: times for key, times in engine.times.items() if times}
    assert engine.scheduler.stats.ended["stop"] > 3 and engine.scheduler.stats.ended["length"] > 3
    assert sum(engine.scheduler.stats.ended.values()) == len(ended) == len(engine.times)
    whole = [times[-1] - engine.arrivals[name] for (name, _), times in ended.items()]
    decodes = [times[-1] - times[0] for times in ended.values()]
    engine.check("e2e_request_latency_seconds", whole)
    engine.check("request_decode_time_seconds", decodes)
    engine.check(
        "request_time_per_output_token_seconds",
        [times and decode / max(1, len(times) - 1) for decode, times in zip(decodes, ended.values(), strict=True)],
    )
    engine.check("request_generation_tokens", [len(times) for times in ended.values()])
    parts = [engine.counted(f"request_{part}_time_seconds").sum for part in ("queue", "prefill", "decode")]
    assert min(parts) > 1 and sum(parts) == pytest.approx(sum(whole))
    assert engine.counted("request_inference_time_seconds").sum == pytest.approx(parts[1] + parts[2])
    longest: defaultdict[str, int] = defaultdict(int)
    for (name, _), times in ended.items():
        longest[name] = max(longest[name], len(times))
    engine.check("request_max_num_generation_tokens", list(longest.values()))
    assert sum(engine.counted("request_params_n").counts) == len(longest)
    assert engine.counted("request_num_preemptions").sum == engine.scheduler.counters["num_preemptions_total"] > 3
    assert engine.counted("iteration_tokens_total").sum == engine.scheduler.counters["num_computed_tokens_total"]


def test_a_wait_for_a_slot_is_time_in_the_queue() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", prompt(3), max_tokens=5, ignore_eos=True)
    engine.now = 2.0
    engine.add("b", prompt(3, 2), max_tokens=1).group.delay = 0.5
    for now in range(3, 9):
        engine.now = float(now)
        engine.step()
    assert engine.finished == ["a", "b"]
    metrics = engine.scheduler.reports.metrics()
    assert metrics["request_queue_time_seconds"]["sum"] == (3 - 0) + (8 - 2 + 0.5)
    assert metrics["e2e_request_latency_seconds"]["sum"] == (7 - 0) + (8 - 2 + 0.5)
    assert metrics["request_prefill_kv_computed_tokens"]["sum"] == 6


def test_who_is_aborted_is_in_no_histogram_of_ends() -> None:
    engine = Engine()
    engine.add("a", prompt(5), max_tokens=9, ignore_eos=True)
    engine.add("b", prompt(5, 2), n=2, max_tokens=9, ignore_eos=True)
    engine.step(3)
    engine.scheduler.abort("a")
    engine.scheduler.abort("b", 1, "stop")
    metrics = engine.scheduler.reports.metrics
    assert metrics()["request_success_total"] == {"stop": 1, "length": 0, "abort": 1, "error": 0}
    assert sum(metrics()["e2e_request_latency_seconds"]["counts"]) == 1
    engine.lose(False, "a step failed")
    assert metrics()["request_success_total"] == {"stop": 1, "length": 0, "abort": 1, "error": 1}
    assert sum(metrics()["request_params_n"]["counts"]) == 0


def test_an_engine_counts_its_phases_and_what_it_refuses(make_llm: Any) -> None:
    llm = make_llm()
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([[5, 6, 7]], greedy, use_tqdm=False)
    metrics = llm.get_metrics()
    assert {phase: sum(seen["counts"]) for phase, seen in metrics["step_phase_seconds"].items()} == dict.fromkeys(
        ("schedule", "submit", "wait", "update"), 4
    )
    assert all(seen["sum"] > 0 for seen in metrics["step_phase_seconds"].values())
    with pytest.raises(ValueError, match="token id 1000000"):
        llm.generate([[10**6]], greedy, use_tqdm=False)
    assert llm.get_metrics()["request_success_total"] == {"stop": 0, "length": 1, "abort": 0, "error": 1}


# --- in a server -----------------------------------------------------------------------------------------------------


def ended(server: Server) -> dict[str, float]:
    found = families(server.get("/metrics")[1])["manta_request_success"].samples
    return {sample.labels["finished_reason"]: sample.value for sample in found}


@pytest.mark.full
def test_a_server_counts_how_its_requests_ended(tmp_path: Path) -> None:
    """Each of two API processes tells the same, whichever of them had the request."""
    with serving(tmp_path, "--api-server-count", "2", "--num-gpu-blocks-override", "16") as server:

        def complete(**fields: Any) -> str:
            status, answer = server.post("/v1/completions", {"prompt": "To be", "temperature": 0} | fields)
            assert status == 200
            return answer

        complete(max_tokens=5, n=3, temperature=1, ignore_eos=True)
        text = json.loads(complete(max_tokens=40, ignore_eos=True))["choices"][0]["text"]
        question = {"messages": [{"role": "user", "content": "What is 23 + 58?"}], "temperature": 0}
        assert '"stop"' in server.post("/v1/chat/completions", question)[1]
        for fields in ({}, {"n": 2}, {"stream": True}):
            assert '"stop"' in complete(max_tokens=500, stop=text[10:20], **fields)
        beams = {"prompt": "x", "max_tokens": 3, "use_beam_search": True, "beam_width": 300, "temperature": 0}
        assert server.post("/v1/completions", beams)[0] == 400  # wider than max_num_seqs, which the engine finds
        sock = server.connect("POST", "/v1/completions", {"prompt": "x", "max_tokens": 900, "ignore_eos": True})
        eventually(lambda: server.metric("num_requests_running") == 1)
        sock.close()
        eventually(lambda: server.running() == 0)
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\nX-Long: " + b"x" * 2**17 + b"\r\n\r\n")
                assert b" 431 " in sock.recv(99)
        assert ended(server) == {"length": 4, "stop": 5, "abort": 1, "error": 1}
        for _ in range(8):  # some of them at each process
            assert server.metric("e2e_request_latency_seconds_count") == 9
            assert server.metric("request_params_n_count") == 6 and server.metric("request_params_n_sum") == 9
            assert server.metric("time_to_first_token_seconds_count") == 10
            assert server.metric('http_requests_total{route="none",status="431"}') == 4
        parts = [server.metric(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(server.metric("e2e_request_latency_seconds_sum"))
        lived = server.metric("time_to_first_token_seconds_count")
        assert server.metric("generation_tokens_total") - lived == server.metric("inter_token_latency_seconds_count")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    """The address of a Prometheus that reads from a port, as docs/deploy says but oftener."""
    text, port = (DEPLOY / "prometheus.yml").read_text(), free_port()
    assert "manta:8000" in text and "scrape_interval: 5s" in text
    text = text.replace("manta:8000", f"127.0.0.1:{target}").replace("scrape_interval: 5s", "scrape_interval: 250ms")
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(DEPLOY / "alerts.yml", folder)
    files = f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"
    with open(folder / "prometheus.log", "w") as log:
        command = ["prometheus", *files, f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def ask(address: str, query: str) -> list[Any]:
    """The numbers that a query gives now; none before Prometheus is up."""
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            results = json.load(response)["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code != 503:  # it is not ready
            raise AssertionError(f"{query}: {error.read().decode()}") from None
        return []
    except urllib.error.URLError:
        return []
    return [value for value in (float(sample["value"][1]) for sample in results) if value == value]


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("prometheus"), reason="there is no Prometheus here")
def test_every_panel_of_the_dashboard_shows_something(tmp_path: Path) -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    variables = {entry["name"]: entry["query"] for entry in dashboard["templating"]["list"]}
    prefixes = variables["prefix"].split(",")
    assert prefixes[0] == ServerConfig.metrics_prefix and "vllm:" in prefixes
    assert variables["model"].endswith(", model_name)") and variables["engine"].endswith(", engine)")
    # As Grafana writes two models and engines that are chosen.
    filled = {"${prefix}": "vllm:", "$__rate_interval": "3s", "$model": "demo|other", "$engine": "0|1"}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) == len(set(queries)) >= 20 and all(panel["targets"] for panel in dashboard["panels"])
    done = threading.Event()

    def load(port: int) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        body = json.dumps({"prompt": "To be " * 60, "max_tokens": 20, "ignore_eos": True})
        while not done.is_set():
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            assert connection.getresponse().read()
            connection.request("GET", "/nope")
            assert connection.getresponse().read()
        connection.close()

    with serving(tmp_path, "--metrics-prefix", "vllm:") as server, prometheus(tmp_path, server.port) as address:
        thread = threading.Thread(target=load, args=(server.port,))
        thread.start()
        try:
            for query in queries:
                for variable, value in filled.items():
                    query = query.replace(variable, value)
                eventually(lambda query=query: ask(address, query), 20)
        finally:
            done.set()
            thread.join()


WELL = {  # series of a server that no alert is about: its value at the start, and what is added every 15 s
    'up{job="manta"}': "1+0", 'http_requests_total{route="/v1/completions",status="200"}': "0+100",
    'num_requests_running{engine="0"}': "1+0", 'num_requests_waiting{engine="0"}': "1+0",
    'num_computed_tokens_total{engine="0"}': "0+9", 'num_worker_restarts_total{engine="0"}': "2+0",
    'time_to_first_token_seconds_bucket{engine="0",le="10.0"}': "0+9",
    'time_to_first_token_seconds_bucket{engine="0",le="20.0"}': "0+9",
    'time_to_first_token_seconds_bucket{engine="0",le="+Inf"}': "0+9",
    'time_to_first_token_seconds_count{engine="0"}': "0+9",
}  # fmt: skip
ILL = {  # by alert, what is otherwise with a server that it is about
    "MantaDown": {'up{job="manta"}': "0+0"},
    "MantaErrors": {'http_requests_total{route="/v1/completions",status="503"}': "0+2"},
    "MantaRefusesForLoad": {'http_requests_total{route="/v1/completions",status="429"}': "0+6"},
    "MantaStalled": {'num_computed_tokens_total{engine="0"}': "9+0"},
    "MantaRestarted": {'num_worker_restarts_total{engine="0"}': "0+1"},
    "MantaFirstTokenLate": {'time_to_first_token_seconds_bucket{engine="0",le="10.0"}': "0+8"},
    "MantaNoFirstToken": {'time_to_first_token_seconds_count{engine="0"}': "9+0"},
}


def test_alerts_are_about_series_that_there_are() -> None:
    names = re.findall(r"manta_(\w+?)(?:_bucket|_count)?\b[{)\[]", (DEPLOY / "alerts.yml").read_text())
    assert len(names) >= 10 and set(names) <= {*SERIES, "http_requests_total"}


@pytest.mark.skipif(not shutil.which("promtool"), reason="there is no Prometheus here")
def test_each_alert_is_raised_by_what_it_is_about_and_by_nothing_else(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    series = []
    for ill in ("", *ILL):
        for name, value in (WELL | ILL.get(ill, {})).items():
            named = ("" if name.startswith("up") else "manta_") + name[:-1] + f',instance="{ill}"}}'
            series.append({"series": named, "values": f"{value}x80"})
    firing = 'count by (alertname, instance) (ALERTS{alertstate="firing"})'
    alerts = [{"labels": f'{{alertname="{ill}", instance="{ill}"}}', "value": 1} for ill in ILL]
    checks = [{"expr": firing, "eval_time": "20m", "exp_samples": alerts}]
    tests = [{"interval": "15s", "input_series": series, "promql_expr_test": checks}]
    rules = {"rule_files": ["alerts.yml"], "evaluation_interval": "15s", "tests": tests}
    (tmp_path / "test.yml").write_text(json.dumps(rules))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
