"""Three nodes of Ray on this machine, for the tests that need a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from bench_ray import new_cluster, replace_node
from executors.ray_executor import join_cluster
from served import eventually

needs_ray = pytest.mark.skipif(not find_spec("ray"), reason="Ray is missing: pip install -r requirements-ray.txt")


@contextlib.contextmanager
def three_nodes() -> Iterator[Any]:
    """Three nodes of two CPUs each, of which this process's is the first; a lost node is noticed within seconds."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        made = new_cluster(3)
        patch.setenv("RAY_ADDRESS", made.address)
        join_cluster()
        yield made
        ray.shutdown()
        made.shutdown()


def free_cpus() -> float:
    import ray

    return ray.available_resources().get("CPU", 0)


def make_up_for(cluster: Any, node: Any) -> None:
    replace_node(cluster, node)
    eventually(lambda: free_cpus() == 6, 30)
