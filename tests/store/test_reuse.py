"""What must agree before a record answers what is asked now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.reuse import Circumstances, model_digest, other_circumstances, other_model

CONFIG = {"model_type": "llama", "num_hidden_layers": 4}
LIBRARIES = {"torch": "2.13.0", "transformers": "5.23.0"}
NOW = Circumstances(model_config=CONFIG, num_batches=5, timeout_s=600.0, memory_bytes=24 * 2**30)


def a_record(now: Circumstances = NOW, **changes: Any) -> Measurement:
    record = Measurement(
        id="a",
        gpu="t4-16gb",
        date="2026-11-22",
        config=RunConfig(model="my-model").to_dict(),
        outcome="ok",
        step_s=(1.0, 1.0),
        environment={"libraries": LIBRARIES},
        provenance=now.noted(),
    )
    return replace(record, **changes)


def test_a_record_made_alike_is_reused_though_its_profile_ended_early() -> None:
    assert other_model(a_record(), CONFIG, in_database=False) == ""
    assert other_circumstances(a_record(), NOW, LIBRARIES) == ""


def test_a_config_is_the_same_in_any_order_and_from_anywhere() -> None:
    moved = {"_name_or_path": "/elsewhere", **dict(reversed(CONFIG.items()))}
    assert model_digest(moved) == model_digest(CONFIG)
    assert model_digest({**CONFIG, "num_hidden_layers": 5}) != model_digest(CONFIG)


def test_a_record_without_a_digest_counts_for_a_model_of_the_database_only() -> None:
    old = a_record(provenance={})
    assert other_model(old, CONFIG, in_database=True) == ""
    assert "did not note" in other_model(old, CONFIG, in_database=False)
    with_config = replace(old, model_config=CONFIG)
    assert other_model(with_config, CONFIG, in_database=False) == ""
    changed = {**CONFIG, "num_hidden_layers": 5}
    assert "another config.json" in other_model(with_config, changed, in_database=False)


@pytest.mark.parametrize(
    ("libraries", "difference"),
    [
        ({"torch": "2.12.0", "transformers": "5.23.0"}, "with torch 2.12.0"),
        ({"torch": "2.13.0"}, "with transformers missing"),
        (None, "with library versions that it does not state"),
    ],
)
def test_other_library_versions_are_named(libraries: Any, difference: str) -> None:
    record = a_record(environment={"libraries": libraries})
    assert other_circumstances(record, NOW, LIBRARIES) == difference


def test_a_time_out_counts_until_more_time_is_given() -> None:
    record = a_record(outcome="timeout", step_s=())
    assert other_circumstances(record, NOW, LIBRARIES) == ""
    assert other_circumstances(record, replace(NOW, timeout_s=60.0), LIBRARIES) == ""
    longer = replace(NOW, timeout_s=601.0)
    assert other_circumstances(record, longer, LIBRARIES) == (
        "with a profile_timeout that was too short"
    )


def test_out_of_memory_counts_until_there_is_more_of_it() -> None:
    record = a_record(outcome="oom", step_s=())
    assert other_circumstances(record, NOW, LIBRARIES) == ""
    larger = replace(NOW, memory_bytes=2 * NOW.memory_bytes)
    assert "less memory" in other_circumstances(record, larger, LIBRARIES)
