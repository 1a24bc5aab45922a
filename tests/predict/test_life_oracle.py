"""The life of small runs with the real Trainer and PEFT on a CPU, against what is predicted."""

import pytest

pytestmark = pytest.mark.oracle
pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

import life_on_cpu
import life_readings

RECORDS = list(life_on_cpu.kept())


def assert_close(measured: dict[str, int], predicted: dict[str, int]) -> None:
    for name, size in measured.items():
        if name in life_readings.TO_THE_BYTE:
            assert predicted[name] == size, name
        elif name in life_readings.ON_DISK:  # an `optimizer.pt` without states has 1.6 kB
            assert predicted[name] == pytest.approx(size, rel=0.02, abs=2000), name
        else:
            assert predicted[name] == pytest.approx(size, rel=0.05), name


@pytest.mark.parametrize("number", range(len(RECORDS)))
def test_kept_readings_are_as_predicted(number: int) -> None:
    record = RECORDS[number]
    assert_close(record["reading"], life_readings.predicted(record["case"]))


@pytest.mark.parametrize("number", [1, 6])
def test_a_reading_is_as_predicted(number: int) -> None:
    """A DoRA run whose embeddings are not tied, and a QLoRA run whose are."""
    case = RECORDS[number]["case"]
    assert_close(life_readings.reading(case), life_readings.predicted(case))
