"""How the strategies of a run divide its GPUs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from whichlora.errors import ConfigError
from whichlora.parallel import ddp
from whichlora.parallel.base import Option, Strategy
from whichlora.parallel.layout import Layout
from whichlora.spec.parallel import ParallelConfig

TENSOR = Strategy(
    name="halves",
    summary="two halves of every matrix",
    divides="model",
    options=(Option(name="half_size", summary="ranks that share a matrix", default=None),),
    size_option="half_size",
)


def layout(gpus: int, **options: Any) -> Layout:
    config = ParallelConfig(strategy="halves+ddp", gpus=gpus, options=tuple(options.items()))
    return Layout.of(config, [TENSOR, ddp.STRATEGY])


def test_the_strategy_without_a_size_takes_what_the_others_leave() -> None:
    (_, halves), (_, data) = layout(8, half_size=2).strategies
    assert (halves.size, data.size) == (2, 4)
    assert layout(8, half_size=2).data_parallel_size == 4


def test_the_config_names_every_option() -> None:
    assert layout(8, half_size=2).config.to_dict() == {
        "strategy": "halves+ddp",
        "gpus": 8,
        "nodes": 1,
        "interconnect": "auto",
        "gradient_as_bucket_view": False,
        "half_size": 2,
    }


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (8, {}, "leaves open how 8 GPUs are divided; give half_size"),
        (9, {"half_size": 2}, "9 can't be divided into 2; give a multiple of 2"),
        (8, {"half_size": 2, "depth": 3}, "depth: is no option of parallel halves.ddp"),
        (8, {"half_size": "two"}, "half_size: 'two' is not a whole number"),
        (8, {"half_size": 2, "gradient_as_bucket_view": 1}, "1 is neither true nor false"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    gpus: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(gpus, **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus": 0}, "gpus: must be 1 to 100000, got 0"),
        ({"gpus": 4.0, "strategy": "ddp"}, "4.0 is not a whole number"),
        ({"gpus": 4}, "parallel: is missing for 4 GPUs"),
        ({"gpus": 4, "nodes": 3, "strategy": "ddp"}, "can't be divided by 3 nodes"),
    ],
)
def test_a_number_of_gpus_that_means_nothing_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**settings)


def test_a_config_is_read_as_it_was_written() -> None:
    config = ParallelConfig(strategy="ddp", gpus=8, nodes=2, options=(("offload", ("params",)),))
    assert ParallelConfig.from_dict(config.to_dict()) == config


def test_a_table_says_what_a_strategy_offloads() -> None:
    options = (("fsdp_version", "2"), ("offload", ("optimizer", "params")))
    config = ParallelConfig(strategy="zero3", gpus=8, nodes=2, options=options)
    assert config.in_words == "zero3, offload optimizer+params, 2 nodes"
