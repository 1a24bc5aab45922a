"""What the base install does, and what it says where an extra is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BASE_MISSES = ("accelerate", "kaleido", "pandas", "peft", "plotly", "scipy", "sklearn", "torch")
PLAN = {
    "models": ["HuggingFaceTB/SmolLM2-135M"],
    "dataset": {"samples": 200, "tokens": 20000},
    "gpu": "a100-sxm-80gb",
}
# a module that stands as None in sys.modules can neither be found nor imported
RUN = f"import sys; sys.modules |= dict.fromkeys({BASE_MISSES})\n"


def without_extras(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN + code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def whichlora(*args: str) -> subprocess.CompletedProcess[str]:
    return without_extras("from whichlora.cli import main; main(prog_name='whichlora')", *args)


def write_plan(folder: Path, **changes: object) -> str:
    path = folder / "plan.yaml"
    path.write_text(json.dumps(PLAN | {"output_dir": str(folder / "out")} | changes))
    return str(path)


@pytest.mark.slow
def test_a_plan_of_predictions_alone_needs_no_extra(tmp_path: Path) -> None:
    done = whichlora("run", write_plan(tmp_path, profile="none"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").stat().st_size > 1e6
    assert (tmp_path / "out" / "train.py").is_file()


PREDICTING = (
    "estimate smollm2-135m --gpu a100-sxm-80gb --method lora,dora",
    "explain smollm2-135m --gpu a100-sxm-80gb",
    "where smollm2-135m --gpu l4,t4",
    "guide --models smollm2-135m --gpu a100-sxm-80gb",
    "calibrate show --gpu a100-sxm-80gb",
)


def test_predicting_needs_no_extra() -> None:
    done = without_extras(
        "from whichlora.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    assert not main(command.split(), standalone_mode=False), command",
        *PREDICTING,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("run PLAN", "profile"),
        ("calibrate --measure PLAN", "profile"),
        ("calibrate fit --gpu a100-sxm-80gb", "profile"),
        ("estimate smollm2-135m --gpu a100-sxm-80gb --engine trace", "profile"),
        ("report OUT --static png", "images"),
        ("slurm plan PLAN --engine local --submit", "profile"),
        ("slurm resume OUT", "profile"),
    ],
)
def test_what_needs_an_extra_says_so_in_one_line_before_it_works(
    tmp_path: Path, command: str, extra: str
) -> None:
    plan = write_plan(tmp_path, gpu="cpu")
    words = {"PLAN": plan, "OUT": str(tmp_path)}
    done = whichlora(*(words.get(word, word) for word in command.split()))
    assert done.returncode == 2
    assert f": pip install 'whichlora[{extra}]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_table_for_pandas_names_its_extra() -> None:
    done = without_extras("import whichlora; whichlora.to_frame([])")
    assert "ConfigError: to_frame: needs pandas: pip install 'whichlora[pandas]'" in done.stderr


def test_coefficients_of_other_formulas_are_fitted_anew_only_with_sklearn(tmp_path: Path) -> None:
    folder = tmp_path / "a100-sxm-80gb"
    folder.mkdir()
    (folder / "coefficients.json").write_text('{"schema_version": 1, "formulas": "older"}')
    command = "estimate smollm2-135m --gpu a100-sxm-80gb --calibration-dir"
    done = whichlora(*command.split(), str(tmp_path))
    assert done.returncode == 2
    assert "is of other formulas; a fit to recorded runs: needs sklearn: pip install" in done.stderr
