"""Comfort in a shell: completion, help, plain output, and the manual page."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import whichlora
from whichlora.cli import main

ROOT = Path(__file__).parents[2]
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7](;[0-9;]*)?m")


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def completions(*args: str) -> list[str]:
    *before, last = args
    shell = ShellComplete(main, {}, "whichlora", "_WHICHLORA_COMPLETE")
    return [item.value for item in shell.get_completions(list(before), last)]


# --- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_says_where_it_goes(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("# whichlora: ")
    assert f"_WHICHLORA_COMPLETE={shell}_complete" in result.stdout


def test_bash_accepts_the_script_and_completes_with_it(tmp_path: Path) -> None:
    program = tmp_path / "whichlora"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{LAUNCH}' \"$@\"\n")
    program.chmod(0o755)
    script = CliRunner().invoke(main, ["completion", "bash"]).stdout
    (tmp_path / "script").write_text(script)
    ask = (
        f"PATH={tmp_path}:$PATH; source {tmp_path}/script; "
        "COMP_WORDS=(whichlora estimate smollm2 --gpu h100); COMP_CWORD=4; COMPREPLY=(); "
        '_whichlora_completion whichlora; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60)
    assert "h100-sxm-80gb" in done.stdout.splitlines(), done.stderr


LAUNCH = 'import sys; sys.argv[0] = "whichlora"; from whichlora.cli import main; main()'


def test_models_complete_in_any_case_and_behind_a_comma() -> None:
    assert "meta-llama/Llama-3.1-8B" in completions("estimate", "META-llama/llama-3.1")
    found = completions("guide", "--models", "Qwen/Qwen2.5-7B,HuggingFaceTB/SmolLM2-1")
    assert found == [
        "Qwen/Qwen2.5-7B,HuggingFaceTB/SmolLM2-1.7B",
        "Qwen/Qwen2.5-7B,HuggingFaceTB/SmolLM2-135M",
    ]


def test_accelerators_complete_from_the_catalog_and_the_users_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHICHLORA_CALIBRATION", str(tmp_path))
    (tmp_path / "my-card-8gb").mkdir()
    (tmp_path / "my-card-8gb" / "gpu.json").write_text("{}")
    assert completions("calibrate", "fit", "--gpu", "my") == ["my-card-8gb"]
    assert completions("estimate", "--gpu", "c") == ["cpu"]
    assert completions("guide", "--gpu", "l4-24gb,my") == ["l4-24gb,my-card-8gb"]
    assert completions("guide", "--gpu") == ["--gpu", "--gpus"]


def test_the_strategies_and_their_options_complete() -> None:
    assert completions("estimate", "--parallel", "dd") == ["ddp"]
    assert completions("estimate", "--gradient-as") == ["--gradient-as-bucket-view"]


def test_choices_complete() -> None:
    assert completions("estimate", "--method", "q") == ["qlora", "qdora"]
    assert completions("estimate", "--optimizer", "adam") == [
        *("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_8bit", "adamw_torch_4bit"),
        "adamw_8bit",
    ]
    assert completions("export", "--to", "tr") == ["transformers", "trl"]


def test_completing_loads_no_heavy_library() -> None:
    code = f"import json, sys; sys.argv = ['whichlora']\nfrom whichlora.cli import main\n{ASK}"
    environment = dict(os.environ) | {
        "_WHICHLORA_COMPLETE": "bash_complete",
        "COMP_WORDS": "whichlora\nestimate\nmeta",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert "meta-llama/Llama-3.1-8B" in done.stdout
    loaded = {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}
    assert not loaded & {"numpy", "pandas", "pydantic", "rich", "sklearn", "scipy", "torch"}


ASK = """
try:
    main(prog_name="whichlora")
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


# --- help


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_every_command_has_an_example_that_can_be_copied(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*path, "--help"], prog_name="whichlora")
    assert result.exit_code == 0
    assert "\\b" not in result.stdout
    example = re.split(r"Examples?:\n", result.stdout)[1].splitlines()[0].strip()
    assert example.startswith(f"whichlora {' '.join(path)}")


def test_help_names_the_exit_codes() -> None:
    text = CliRunner().invoke(main, ["--help"]).stdout
    assert "0 done, 1 nothing meets the limits, 2 bad request, 130 interrupted" in " ".join(
        text.split()
    )


def test_python_m_imports_nothing_from_the_folder_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('mine')")
    root = str(Path(whichlora.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "whichlora", "--version"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- plain output


def on_a_terminal(*args: str, **environment: str) -> str:
    """What the command writes to a terminal."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "whichlora", *args],
        stdout=child,
        stderr=child,
        stdin=child,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(child)
    chunks = []
    while True:
        try:
            chunk = os.read(parent, 1 << 16)
        except OSError:  # Linux says so when the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(parent)
    assert process.wait(timeout=60) == 0
    return b"".join(chunks).decode()


COMMANDS = [
    ("models", "SmolLM2"),
    ("estimate", "HuggingFaceTB/SmolLM2-135M", "--gpu", "l4-24gb"),
    ("guide", "--models", "HuggingFaceTB/SmolLM2-135M", "--gpu", "l4-24gb"),
]


@pytest.mark.parametrize("args", COMMANDS, ids=lambda args: args[0])
def test_no_color_means_no_colour_on_a_terminal(args: tuple[str, ...]) -> None:
    assert not COLOUR.search(on_a_terminal(*args, NO_COLOR="1"))


@pytest.mark.parametrize("args", COMMANDS, ids=lambda args: args[0])
def test_away_from_a_terminal_nothing_is_escaped_or_cut(args: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "whichlora", *args], capture_output=True, text=True, timeout=60
    )
    assert "\x1b" not in done.stdout + done.stderr
    assert "HuggingFaceTB/SmolLM2-135M" in done.stdout
    assert "…" not in done.stdout


# --- the manual


def test_the_manual_is_what_the_commands_say() -> None:
    script = ROOT / "benchmarks" / "cli_page.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_manual_has_every_command() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for path in commands():
        assert f"\n{'#' * (len(path) + 1)} whichlora {' '.join(path)}\n" in text


def test_an_interrupt_is_neither_done_nor_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("whichlora.workflow.run.run_plan", interrupt)
    result = CliRunner().invoke(main, ["run", "my plan.yaml", "--fresh", "--prefer", "time"])
    said = "go on with: whichlora run 'my plan.yaml' --prefer time\n"
    assert (result.exit_code, result.stderr) == (
        130,
        f"interrupted; what was measured is kept, {said}",
    )


def test_a_locale_without_our_signs_gets_the_answer_all_the_same() -> None:
    command = ["estimate", "HuggingFaceTB/SmolLM2-135M", "--gpu", "h100-sxm-80gb"]
    done = subprocess.run(
        [sys.executable, "-m", "whichlora", *command, "--phase", "inference", "--batch-size", "64"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert " ?s /token" in done.stdout  # µs
