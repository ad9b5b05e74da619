"""Composes the DeepSpeed JSON of the tiny recipe with overrides, for tests."""

from __future__ import annotations

import pytest

from base.errors import UserError
from recipes.compose import compose
from runtime.ds_config.merge import EngineConfig, engine_config


def config(*overrides: str, data_size: int = 2, accumulation: int = 2) -> EngineConfig:
    """The JSON of `tiny` with overrides."""
    return engine_config(
        compose("tiny", overrides).recipe,
        data_size=data_size,
        accumulation=accumulation,
        accumulates=accumulation > 1,
    )


def refused(*overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        config(*overrides)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def only(*overrides: str) -> str:
    problems = refused(*overrides)
    assert len(problems) == 1, problems
    return problems[0]
