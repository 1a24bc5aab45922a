"""What the benchmark of reserved memory says a replay's share of the spread must be."""

from dataclasses import replace

import pytest
import reserved_accuracy
from devices import A100

from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.judged import judged_run
from whichlora.predict.judgement import REPLAYED_SPREAD
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.models import find_model


def test_the_needed_spread_is_the_one_whose_interval_ends_at_the_measured_value() -> None:
    model = find_model("HuggingFaceTB/SmolLM2-135M")
    assert model is not None
    run = RunConfig(model=model.name, batch_size=8, seq_len=1024, attn="eager")
    judged = judged_run(resolve(model, run, A100), prior_calibration(A100))
    assert judged.is_replayed
    _, high = judged.reserved_interval()
    _, high_of_estimate = replace(judged, is_replayed=False).reserved_interval()
    predicted = judged.peak_reserved_bytes
    for value, spread in (
        (predicted, 0),
        (high, REPLAYED_SPREAD),
        (2 * predicted - high, REPLAYED_SPREAD),  # as far below
        (high_of_estimate, 1),
    ):
        needed = reserved_accuracy.needed_spread(judged, value)
        assert needed == pytest.approx(spread, abs=1e-6)


def test_the_spread_of_many_is_the_next_run_s_and_of_few_unknown() -> None:
    assert reserved_accuracy.spread_of([number / 100 for number in range(39)]) == 0.37
    assert reserved_accuracy.spread_of([0.1] * 18) == float("inf")
