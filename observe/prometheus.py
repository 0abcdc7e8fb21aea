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
    models: Mapping[str, Mapping[int, dict[str, Any]]], replies: Mapping[str, int], prefix: str, several: bool = False
) -> bytes:
    """All series in Prometheus' text format.

    In OpenMetrics, prometheus_client (0.26) writes an underscore for the colon of vLLM's names.

    Args:
        models: what `EngineCore.metrics` returned, by name and rank; `several`: whether there may be several models.
        replies: how often each "STATUS ROUTE" was answered.
    """
    about = "HTTP requests that were answered, refused ones as well."
    requests = CounterMetricFamily(prefix + "http_requests", about, labels=["status", "route"])
    for name, count in replies.items():
        requests.add_metric(name.split(" "), count)
    series = [*families(models, prefix, several), requests]
    return generate_latest(SimpleNamespace(collect=lambda: series))


def families(models: Mapping[str, Mapping[int, dict[str, Any]]], prefix: str, several: bool) -> Iterator[Metric]:
    """The series that engines have counted. Where there are several models, all of them say whose they are."""
    engines = [(model, str(rank), metrics) for model, by_rank in models.items() for rank, metrics in by_rank.items()]
    for name in dict.fromkeys(name for *_, metrics in engines for name in metrics):
        series, values = SERIES[name], [(*whose, metrics[name]) for *whose, metrics in engines if name in metrics]
        if series.kind in ("info", "moment"):
            labels, first = ["model_name", "engine", *values[0][2]], not several  # alone, it is not named here
            info = GaugeMetricFamily(prefix + name, series.help, labels=labels[first:])
            for *whose, facts in values:
                info.add_metric([*whose, *facts.values()][first:], time.time() if series.kind == "moment" else 1)
            yield info
            continue
        labels = ["model_name", "engine", *([series.label] if series.label else [])]
        family = FAMILIES[series.kind](prefix + name, series.help, labels=labels)
        for model, engine, value in values:
            for label, one in value.items() if series.label else [(None, value)]:
                mine = [model, engine, *([label] if series.label else [])]
                family.add_metric(mine, *(buckets(one) if series.kind == "histogram" else (one,)))
        yield family


def buckets(histogram: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """A histogram's buckets as Prometheus has them, each with all values below its bound, and its sum."""
    bounds = [*map(floatToGoString, histogram["bounds"]), "+Inf"]
    return list(zip(bounds, accumulate(histogram["counts"]), strict=True)), histogram["sum"]
