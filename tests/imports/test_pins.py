"""Versions that a script installs: which are read, and what is predicted with them."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from whichlora import estimate
from whichlora.imports import import_files
from whichlora.imports.pins import pins_of
from whichlora.spec.versions import Libraries

MODEL = "HuggingFaceTB/SmolLM2-135M"
TRAINS = f'SFTTrainer("{MODEL}", args=SFTConfig("o", max_length=64))\n'
SFT = f"trl sft --model_name_or_path {MODEL} --max_length 64 --dataset_name d\n"


def notebook(*cells: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": [each]} for each in cells]})


@pytest.mark.parametrize(
    ("cells", "pins"),
    [
        (['!pip install "trl==0.22.2" transformers==4.56.2'], "transformers 4.56.2 trl 0.22.2"),
        (["%pip install -q trl[peft]==0.22.2"], "trl 0.22.2"),
        (["!pip install --no-deps trl==0.22.2 && echo done"], "trl 0.22.2"),
        (["!uv pip install -qqq \\\n  'trl==0.22.2; python_version>\"3.9\"'"], "trl 0.22.2"),
        (["%%capture\nimport os\n!pip3 install torch==2.8.0+cu126 # for T4"], "torch 2.8.0+cu126"),
        (["%%bash\npip install trl==0.22.2"], "trl 0.22.2"),
        (["!pip install trl==0.22.2", "!pip install trl==0.24.0"], "trl 0.24.0"),
        (["if a:\n    !pip install trl==0.22.2\nelse:\n    !pip install trl==0.24.0"], ""),
        (["if a:\n    !pip install trl==0.24.0\n!pip install trl==0.22.2"], "trl 0.22.2"),
        (["!pip install trl==0.22.2", "!pip install -U trl"], ""),
        (['!pip install "trl>=0.22" transformers==4.56.* peft~=0.17', "x = 'trl==0.1'"], ""),
        (["!pip install datasets==4.3.0 {xformers} trl=={version}"], ""),
        (["!echo pip; pip install 'trl==0.22.2", "# !pip install trl==0.22.2"], ""),
    ],
)
def test_exact_pins_of_a_notebook_are_read(cells: Sequence[str], pins: str) -> None:
    found = pins_of(Path("n.ipynb"), notebook(*cells))
    assert " ".join(map(" ".join, found.items())) == pins


def test_a_shell_script_and_its_requirements_are_read(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("# ours\ntrl==0.22.2  # the last\npeft>=0.17\n")
    path = tmp_path / "train.sh"
    path.write_text(f"pip install -r requirements.txt\nuv pip install peft==0.17.1\n{SFT}")
    settings = import_files([path]).settings
    assert settings["libraries"] == (("peft", "0.17.1"), ("trl", "0.22.2"))
    path.write_text(f"# pip install trl==0.22.2\npip install -r there/requirements.txt\n{SFT}")
    assert "libraries" not in import_files([path]).settings


def test_a_header_of_a_script_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    header = '# /// script\n# dependencies = [\n#   "trl==0.22.2",\n#   "peft",\n# ]\n# ///\n'
    path.write_text(f"{header}{TRAINS}")
    read = import_files([path])
    assert read.settings["libraries"] == (("trl", "0.22.2"),)
    assert "installs trl 0.22.2, taken as --libraries" in read.assumed


def test_what_the_user_states_comes_first_and_pins_are_what_it_would_say(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(notebook("!pip install trl==0.24.0 transformers==4.56.2", TRAINS))
    read = import_files([path], libraries=Libraries(trl="0.20.0"))
    assert "libraries" not in read.settings
    assert not any("installs" in text for text in read.assumed)
    stated = {"trl": "0.24.0", "transformers": "4.56.2"}
    gpu = "a100-sxm-80gb"
    (pinned,) = estimate(from_file=path, gpu=gpu)
    (same,) = estimate(from_file=path, gpu=gpu, libraries=stated)
    (other,) = estimate(from_file=path, gpu=gpu, libraries={"trl": Libraries().trl})
    assert pinned.memory == same.memory != other.memory


def test_arguments_of_older_releases_are_those_of_libraries_that_no_one_pins(
    tmp_path: Path,
) -> None:
    path = tmp_path / "n.ipynb"
    trains = TRAINS.replace("max_length=64)", "max_length=64), tokenizer=t")
    path.write_text(notebook("!pip install transformers==4.48.1", trains))
    assert import_files([path]).settings["libraries"] == (
        ("transformers", "4.48.1"),
        ("trl", "0.15.2"),
    )
    path.write_text(notebook("!pip install trl==0.24.0 transformers==4.56.2", trains))
    read = import_files([path])
    assert read.settings["libraries"] == (("transformers", "4.56.2"), ("trl", "0.24.0"))
    assert "trl 0.24.0 refuses tokenizer of SFTTrainer" in read.assumed


def test_a_trainer_in_place_of_unsloths_is_the_current_one_whatever_is_installed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "n.ipynb"
    loads = f'model, t = FastLanguageModel.from_pretrained("{MODEL}", max_seq_length=64)\n'
    loads += "model = FastLanguageModel.get_peft_model(model)\n"
    installs, imports = "!pip install trl==0.22.2", "import unsloth"
    path.write_text(notebook(installs, imports, loads, "SFTTrainer(model, args=SFTConfig('o'))"))
    assert import_files([path]).settings["libraries"] == (("trl", "0.22.2"),)
    path.write_text(notebook(installs, imports, loads, "DPOTrainer(model, args=DPOConfig('o'))"))
    read = import_files([path])
    assert read.settings["libraries"] == ()
    assert any(f"TRL {Libraries().trl}'s trainer without" in text for text in read.assumed)
