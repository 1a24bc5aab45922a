"""Write docs/cli.md, the manual of the command line, from the commands themselves.

python benchmarks/cli_page.py            write it
python benchmarks/cli_page.py --check    say whether it is current (exit code 1: it is not)
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from whichlora.cli import main as whichlora

PAGE = ROOT / "docs" / "cli.md"
HEAD = """\
# whichlora(1)

Made by `python benchmarks/cli_page.py`; `whichlora COMMAND --help` prints the same.

## Conventions

- A list with commas makes a grid: `--batch-size 1,4`.
- stdout holds the answer, stderr progress and notes. `--json` has a `schema_version`.
- Output that is no terminal has no colour, and no line is redrawn.
- Completion of commands, options, models, accelerators: `whichlora completion bash` (zsh, fish).

| variable | meaning |
| --- | --- |
| `WHICHLORA_CALIBRATION` | your calibration folder; else in `$XDG_DATA_HOME` or `~/.local/share` |
| `HF_HUB_OFFLINE` | 1 keeps it off the network |
| `NO_COLOR` | anything switches colours off |

## Exit codes

| code | meaning |
| --- | --- |
| 0 | done |
| 1 | nothing meets the limits; of `estimate --check`, a run does not fit |
| 2 | bad request, or a step failed: one line on stderr says what, and what to do |
| 130 | interrupted; `whichlora run` and `slurm resume` go on with what was measured |
| 141 | the reader of the output ended first, as in `whichlora gpus \\| head` |

A traceback is a bug: please report it.
"""


def page() -> str:
    """The whole manual."""
    return HEAD + "".join(_command(["whichlora", name], one) for name, one in _commands(whichlora))


def _commands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """In alphabetical order."""
    for name in sorted(group.commands):
        yield name, group.commands[name]


def _command(path: list[str], command: click.Command) -> str:
    name = " ".join(path)
    text, *examples = re.split("\b\nExamples?:\n", inspect.cleandoc(command.help or ""))
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"\n{'#' * len(path)} {name}\n\n```text\n{usage}\n```\n\n{text.strip()}\n"]
    params = [one for one in command.get_params(context) if "--help" not in one.opts]
    options = [one for one in params if isinstance(one, click.Option)]
    rows = [_option(option) for option in options if not option.hidden]
    if rows:
        parts.append("\n| option | meaning |\n| --- | --- |\n" + "".join(rows))
    parts += [f"\n```bash\n{inspect.cleandoc(one)}\n```\n" for one in examples]
    if isinstance(command, click.Group):
        parts += [_command([*path, sub], one) for sub, one in _commands(command)]
    return "".join(parts)


def _option(option: click.Option) -> str:
    flags = ", ".join(f"`{one}`" for one in option.opts)
    flags += "".join(f" / `{one}`" for one in option.secondary_opts)
    meaning = (option.help or "").replace("|", "\\|")
    if isinstance(option.type, click.Choice):
        meaning += f" One of {', '.join(option.type.choices)}."
    if option.required:
        meaning += " Required."
    if option.show_default and isinstance(option.default, bool) and option.secondary_opts:
        meaning += f" Default: {(option.opts if option.default else option.secondary_opts)[0]}."
    elif option.show_default:
        default = option.default
        default = ", ".join(default) if isinstance(default, tuple) else default
        meaning += f" Default: {default}."
    return f"| {flags} | {meaning.strip()} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    found = page()
    if options.check:
        if PAGE.read_text(encoding="utf-8") != found:
            sys.exit("docs/cli.md is not current: run python benchmarks/cli_page.py")
        return
    PAGE.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()
