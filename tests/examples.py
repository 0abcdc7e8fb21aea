"""Tests of a check on examples: chosen ones, and in the tier full those that hypothesis draws, too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DRAWN = settings(derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tried(*strategies: st.SearchStrategy[Any], on: list[tuple[Any, ...]], drawn: int) -> Callable[..., Any]:
    """Makes a test of a check: on the examples `on`, and in the tier full on `drawn` ones of the strategies.

    The last parameters of the check are of the strategies, and those before them are fixtures.
    """

    def decorate(check: Callable[..., Any]) -> Callable[..., Any]:
        fixtures = list(inspect.signature(check).parameters.values())[: -len(strategies)]

        @functools.wraps(check)
        def seeded(*args: Any, **values: Any) -> None:
            torch.manual_seed(0)  # an example that fails does so again
            check(*args, **values)

        draw = settings(DRAWN, max_examples=drawn)(given(*strategies)(seeded))

        @pytest.mark.parametrize("examples", ["chosen", pytest.param("drawn", marks=pytest.mark.full)])
        def test(examples: str, **values: Any) -> None:
            if examples == "drawn":
                draw(**values)
            else:
                for example in on:
                    check(*(values[fixture.name] for fixture in fixtures), *example)

        own = inspect.Parameter("examples", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([own, *fixtures])
        test.__name__ = test.__qualname__ = check.__name__.replace("check", "test", 1)
        test.__doc__, test.__module__ = check.__doc__, check.__module__
        return test

    return decorate
