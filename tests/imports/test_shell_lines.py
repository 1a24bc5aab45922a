"""Comments within a command, as bash takes them."""

from pathlib import Path

from whichlora.imports import import_files
from whichlora.imports.shell_lines import CUT, logical_lines

MODEL = "Qwen/Qwen2.5-0.5B"


def test_a_comment_ends_a_continued_line_and_a_backslash_in_it_continues_nothing() -> None:
    text = "a \\\n# b \\\nc 'd # e' f#g # h\n# i\nj \\\nk"
    lines = list(logical_lines(text))
    assert lines == [f"a   {CUT}2", "c 'd # e' f#g ", "", "j  k"]


def test_a_number_sign_in_quotes_over_lines_is_text() -> None:
    assert list(logical_lines("echo 'a\n# b'\nc # d")) == ["echo 'a", "# b'", "c "]


def notes(folder: Path, text: str) -> tuple[dict[str, object], str]:
    path = folder / "train.sh"
    path.write_text(text)
    read = import_files([path])
    return dict(read.settings), "\n".join(read.assumed)


def test_options_behind_a_comment_do_not_reach_the_program(tmp_path: Path) -> None:
    text = f"""swift sft \\
  --model {MODEL} \\
  # --target_modules all-linear \\
  --dataset a#500 --max_length 512 \\
  --deepspeed zero3
"""
    settings, said = notes(tmp_path, text)
    assert "seq_len" not in settings
    cut = "line 3 is a comment and ends the command: --max_length, --deepspeed, 1 without effect"
    assert f"{cut} never reach swift sft" in said
    settings, said = notes(tmp_path, text.replace("  # --target_modules all-linear \\\n", ""))
    assert settings["seq_len"] == 512
    assert "never reach" not in said


def test_variables_before_a_comment_are_set_and_not_exported(tmp_path: Path) -> None:
    text = f"NPROC_PER_NODE=2 \\\n# MAX_PIXELS=1 \\\nswift sft --model {MODEL} --max_length 9\n"
    settings, said = notes(tmp_path, text)
    assert settings["gpus"] == 1
    assert "line 2 is a comment and ends the command: swift sft does not see NPROC_PER_NODE" in said
    settings, said = notes(tmp_path, text.replace("# MAX_PIXELS=1 \\\n", ""))
    assert settings["gpus"] == 2
    assert "does not see" not in said
    settings, said = notes(tmp_path, text.replace("NPROC", "export NPROC"))
    assert settings["gpus"] == 2
    assert "does not see" not in said


def test_a_launcher_hears_its_option_and_not_the_variable(tmp_path: Path) -> None:
    launch = "torchrun --nproc_per_node $NPROC_PER_NODE sft.py"
    text = f"NPROC_PER_NODE=2\n{launch} --model_name_or_path {MODEL}"
    settings, said = notes(tmp_path, text)
    assert settings["gpus"] == 2
    assert "does not see" not in said
