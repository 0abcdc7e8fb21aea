"""The text of `GET /metrics` for Prometheus: the engines' metrics, and how many requests were answered."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from observe.metrics import SERIES

FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


def exposition(
    engines: Mapping[int, dict[str, Any]], replies: Mapping[str, int], prefix: str, model_name: str
) -> bytes:
    """All series in Prometheus' text format.

    In OpenMetrics, prometheus_client (0.26) writes an underscore for the colon of vLLM's names.

    Args:
        engines: what `EngineCore.metrics` returned, by rank.
        replies: how often each "STATUS ROUTE" was answered.
    """
    about = "HTTP requests that were answered, refused ones as well."
    requests = CounterMetricFamily(prefix + "http_requests", about, labels=["status", "route"])
    for name, count in replies.items():
        requests.add_metric(name.split(" "), count)
    series = [*families(engines, prefix, model_name), requests]
    return generate_latest(SimpleNamespace(collect=lambda: series))


def families(engines: Mapping[int, dict[str, Any]], prefix: str, model_name: str) -> Iterator[Metric]:
    """The series that engines have counted."""
    for name in next(iter(engines.values())):
        series, values = SERIES[name], {str(rank): metrics[name] for rank, metrics in engines.items()}
        if series.kind in ("info", "moment"):
            first = next(iter(values.values()))
            info = GaugeMetricFamily(prefix + name, series.help, labels=["engine", *first])
            for engine, labels in values.items():
                info.add_metric([engine, *labels.values()], time.time() if series.kind == "moment" else 1)
            yield info
            continue
        labels = ["model_name", "engine", *([series.label] if series.label else [])]
        family = FAMILIES[series.kind](prefix + name, series.help, labels=labels)
        for engine, value in values.items():
            for label, one in value.items() if series.label else [(None, value)]:
                mine = [model_name, engine, *([label] if series.label else [])]
                family.add_metric(mine, *(buckets(one) if series.kind == "histogram" else (one,)))
        yield family


def buckets(histogram: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """A histogram's buckets as Prometheus has them, each with all values below its bound, and its sum."""
    bounds = [*map(floatToGoString, histogram["bounds"]), "+Inf"]
    return list(zip(bounds, accumulate(histogram["counts"]), strict=True)), histogram["sum"]
