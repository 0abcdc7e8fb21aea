"""How Prometheus is told what the engines count: `metrics.py` says what that is, prometheus_client writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from metrics import SERIES

FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


class EngineCollector(Collector):
    """What some engines have counted.

    Args:
        engines: of each, by its rank, what `EngineCore.metrics` returned.
        prefix: of all names.
        model_name: a label of all series.
    """

    def __init__(self, engines: Mapping[int, dict[str, Any]], prefix: str, model_name: str):
        self.engines, self.prefix, self.model_name = engines, prefix, model_name

    def collect(self) -> Iterator[Metric]:
        """The series, each with the values of all engines."""
        for name in next(iter(self.engines.values())):
            series, values = SERIES[name], {str(rank): told[name] for rank, told in self.engines.items()}
            if series.kind == "info":
                first = next(iter(values.values()))
                info = GaugeMetricFamily(self.prefix + name, series.help, labels=["engine", *first])
                for engine, labels in values.items():
                    info.add_metric([engine, *labels.values()], 1)
                yield info
                continue
            labels = ["model_name", "engine", *([series.label] if series.label else [])]
            family = FAMILIES[series.kind](self.prefix + name, series.help, labels=labels)
            for engine, value in values.items():
                for label, one in value.items() if series.label else [(None, value)]:
                    mine = [self.model_name, engine, *([label] if series.label else [])]
                    family.add_metric(mine, *(buckets(one) if series.kind == "histogram" else (one,)))
            yield family


def buckets(told: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """A histogram's buckets as Prometheus has them, each with all values below its bound, and its sum."""
    bounds = [*map(floatToGoString, told["bounds"]), "+Inf"]
    return list(zip(bounds, accumulate(told["counts"]), strict=True)), told["sum"]


def exposition(engines: Mapping[int, dict[str, Any]], prefix: str, model_name: str) -> bytes:
    """The series of `EngineCollector` in Prometheus' text format, whatever else the reader takes.

    In OpenMetrics, prometheus_client (0.26) writes an underscore for the colon of vLLM's names.
    """
    return generate_latest(EngineCollector(engines, prefix, model_name))
