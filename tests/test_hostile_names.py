"""No text of a user becomes code: each name is refused in one line, or stays a name."""

import ast
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from whichlora.cli import main
from whichlora.cluster.slurm.discovery import GpuGroup
from whichlora.cluster.slurm.scripts import array_script, merge_script, training_script
from whichlora.cluster.state import Sweep
from whichlora.config import load_plan
from whichlora.errors import ConfigError, DataFileError, WhichLoraError
from whichlora.exports import FORMATS, Recipe
from whichlora.exports.python_source import literal
from whichlora.exports.yaml import yaml_text
from whichlora.spec.plan import SlurmConfig
from whichlora.spec.run import RunConfig
from whichlora.workflow import export

Made = TypeVar("Made")
HARMLESS = "harmless"
HOSTILE = [
    *(
        'a"b',
        "a'b",
        '"""',
        "'''",
        '"""\nimport os\nos.system("touch pwned")\n"""',
        "a\nb",
        "a\r\nb",
    ),
    *("\\", '\\"', "\\n", "\\N{BULLET}", "\\U0000000a", "$(touch pwned)", "`touch pwned`"),
    *("; touch pwned", "&& touch pwned", "| touch pwned", "'; touch pwned; '", "$HOME", "${IFS}"),
    *("{}", "{model}", "{0.__class__}", "{{", "}", "%s", "%(model)s", "a # b", "# b"),
    *("a: b", "- a", "!!python/object/apply:os.system [touch pwned]", "&a", "*a", "|", ">", "@a"),
    *("~", "=", "<<", ".5", ".inf", "1e3", "0x10", "2001-01-01", "yes", "Null", "---", "[a", "?"),
    *("a\u2028b", "a\u2029b", "a\x85b", "a\u202eb", "a\u2066b", "a\u200bb", "\x1b[31m", "\x00"),
    *("a\tb", "a\x0cb", "\ud800", " ", "", "é漢字", "😀", " a", "a "),
]
NAMES = pytest.mark.parametrize("name", HOSTILE, ids=ascii)
MODEL = "HuggingFaceTB/SmolLM2-135M"


@cache
def base() -> Recipe:
    run = RunConfig(model=MODEL, method="qlora", batch_size=4, seq_len=512)
    return export.make_recipe(run, "l4-24gb")


def with_run(**settings: Any) -> Recipe:
    recipe = base()
    return replace(recipe, run=replace(recipe.run, **settings))


def with_config(recipe: Recipe, **values: Any) -> Recipe:
    config = {**(recipe.model_config or {}), **values}
    return replace(recipe, weights="random", model_config=config)


FIELDS: dict[str, Callable[[str], Recipe]] = {
    "model": lambda name: with_run(model=name),
    "method": lambda name: with_run(method=name),
    "modules_to_save": lambda name: with_run(modules_to_save=(name,)),
    "target_modules": lambda name: replace(base(), target_modules=("q_proj", name)),
    "target_modules as text": lambda name: replace(base(), target_modules=name),
    "tokenizer": lambda name: replace(base(), tokenizer=name),
    "gpu": lambda name: replace(base(), gpu=name),
    "a value of the config": lambda name: with_config(base(), model_type=name),
    "a key of the config": lambda name: with_config(base(), **{name: [{name: name}]}),
}


def shape(node: Any) -> Any:
    """A tree of Python with every string replaced, so that only its structure is compared."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            each.value = ""
    return ast.dump(node)


def yaml_shape(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: yaml_shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [yaml_shape(item) for item in value]
    return type(value)


def parsed(name: str, text: str) -> Any:
    assert "\ud800" not in text
    text.encode()
    if name.endswith(".py"):
        return shape(ast.parse(text))
    if name.endswith(".json"):
        return yaml_shape(json.loads(text))
    return yaml_shape(YAML(typ="safe", pure=True).load(text))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("to", FORMATS)
def test_a_name_is_refused_or_changes_nothing_but_itself(to: str, field: str) -> None:
    try:
        files = FORMATS[to](FIELDS[field](HARMLESS)).files
    except WhichLoraError:  # a method or a GPU of that name, random weights: refused anyway
        files = {}
    expected = {file: (parsed(file, text), comments(text)) for file, text in files.items()}
    written = 0
    for name in HOSTILE:
        made = attempt(lambda: FORMATS[to](FIELDS[field](name)).files)  # noqa: B023
        if isinstance(made, str):
            assert made.isprintable()
            continue
        written += 1
        for file, text in made.items():
            assert (parsed(file, text), comments(text)) == expected[file], ascii(name)
    assert bool(written) == bool(expected)


def attempt(make: Callable[[], Made]) -> Made | str:
    """What `make` makes, or the one line it is refused with."""
    try:
        return make()
    except WhichLoraError as refusal:
        (line,) = str(refusal).splitlines()
        return line


def comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip().startswith("#")]


@NAMES
def test_a_recipe_of_somebody_else_is_refused_in_one_line_or_read(
    name: str, tmp_path: Path
) -> None:
    texts = ("gpu", "tokenizer", "weights", "batching", "target_modules", "train_on")
    for field in (*texts, "epochs", "seed", "data_format", "keeping"):
        values = base().to_dict() | {field: name}
        (tmp_path / "recipe.json").write_text(json.dumps(values))
        read = attempt(lambda: export.read_recipe(tmp_path))
        if isinstance(read, str):
            assert read.startswith(str(tmp_path / "recipe.json"))
            continue
        assert getattr(read, field) == name
        assert field in ("gpu", "tokenizer", "target_modules")


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": float("1e13")},
        {"epochs": True},
        {"learning_rate": 0},
        {"learning_rate": "2e-4"},
        {"seed": 1.5},
        {"seed": -1},
        {"masked_lm": "yes"},
        {"trust_remote_code": 1},
        {"model_config": [1]},
        {"target_modules": [1]},
        {"target_modules": 5},
        {"gpu": None},
        {"data_format": {"kind": "text", "conversational": True}},
        {"data_format": {"kind": ["text"]}},
        {"keeping": {"save_steps": "print()"}},
        {"keeping": {"save_total_limit": 0}},
        {"keeping": {"colour": 1}},
        {"train_on": None},
        {"run": []},
        {"run": {"model": "x", "gradient_checkpointing": "os.system('x')"}},
        {"run": {"model": "x", "use_rslora": 1}},
        {"run": {"model": "x", "lora_dropout": "0"}},
        {"run": {"model": "x", "batch_size": "1"}},
        {"run": {"model": 7}},
        {"run": {"model": "x", "libraries": ["a"]}},
    ],
    ids=str,
)
def test_a_recipe_with_a_value_of_another_kind_is_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(base().to_dict() | change))
    with pytest.raises(DataFileError) as refusal:
        export.read_recipe(tmp_path)
    assert len(str(refusal.value).splitlines()) == 1


def test_remote_code_that_a_recipe_allows_is_said(tmp_path: Path) -> None:
    done = export.write_export(replace(base(), trust_remote_code=True), "transformers", tmp_path)
    assert any("runs code that comes with the model" in note for note in done.export.notes)


@given(st.text() | st.floats() | st.integers() | st.none() | st.booleans())
def test_a_literal_is_read_back_as_it_was(value: Any) -> None:
    source = literal([value, {"key": value}])
    assert source.isprintable() or "\n" in source
    read = eval(source, {"__builtins__": {"float": float}})  # the value itself is under test
    assert repr(read) == repr([value, {"key": value}])


@given(st.dictionaries(st.text(), st.text() | st.lists(st.text(), min_size=1), min_size=1))
def test_yaml_is_read_back_as_it_was(settings: dict[str, Any]) -> None:
    assert YAML(typ="safe", pure=True).load(yaml_text(settings)) == settings


# --- batch scripts


def scripts(name: str, tmp_path: Path) -> dict[str, str]:
    group = GpuGroup(
        name="a100", gpu="a100-sxm-80gb", partitions=(name,), constraint=name, gres_type=name
    )
    config = SlurmConfig(
        account=name, qos=name, merge_partition=name, environment={"HF_HOME": name}
    )
    where = tmp_path / name
    options: dict[str, Any] = {"limit_s": 60.0}
    return {
        "array": array_script(
            group,
            config,
            tasks=where / "tasks.json",
            num_tasks=2,
            max_array_size=10,
            logs=where,
            command="true",
            **options,
        ),
        "merge": merge_script(
            config, run_dir=where, cluster=name, logs=where, command="true", **options
        ),
        "training": training_script(
            group,
            config,
            job=where / "train.py",
            run=RunConfig(model=name),
            python="/bin/true",
            **options,
        ),
    }


@pytest.mark.parametrize("name", [name for name in HOSTILE if name], ids=ascii)
def test_a_batch_script_runs_nothing_of_a_name(name: str, tmp_path: Path) -> None:
    written = attempt(lambda: scripts(name, tmp_path))
    if isinstance(written, str):
        return
    expected = scripts(HARMLESS, tmp_path)
    for kind, text in written.items():
        path = tmp_path / f"{kind}.sh"
        path.write_text(text)
        environment = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": "0"}
        done = subprocess.run(["bash", str(path)], cwd=tmp_path, env=environment)
        assert done.returncode == 0
        assert len(text.splitlines()) == len(expected[kind].splitlines())
    assert not (tmp_path / "pwned").exists()


def test_a_run_directory_that_would_end_a_comment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run directory: .* U\+000A, which can't be seen"):
        Sweep(run_dir=tmp_path / "a\nb", config=tmp_path, engine="local", groups=())


# --- config files


@pytest.mark.parametrize(
    "key",
    ["models", "gpu", "target_modules", "modules_to_save", "output_dir", "calibration_dir"],
)
def test_a_name_in_a_config_that_cannot_be_seen_is_refused_with_its_line(
    key: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f'dataset: {{tokens: 100, samples: 1}}\n{key}: "a\\u202Eb"\n')
    with pytest.raises(ConfigError) as refusal:
        load_plan(path)
    (line,) = str(refusal.value).splitlines()
    assert line.startswith(f"{path}:2:1: {key}: holds a character that can't be seen")
    assert line.isprintable()


# --- the command


def test_a_model_folder_with_code_for_a_name_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    folder = tmp_path / 'x"""\nimport os\n"""'
    folder.mkdir()
    for to in FORMATS:
        args = ["export", str(folder), "--to", to, "--gpu", "l4-24gb", "--output", str(tmp_path)]
        result = CliRunner().invoke(main, args, prog_name="whichlora")
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
