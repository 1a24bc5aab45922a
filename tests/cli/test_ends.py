"""How the program ends where nobody reads its output, or it is interrupted at any time."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = f"{sys.executable} -m whichlora"
INTERRUPTED_IMPORT = """
import sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "MODULE":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from whichlora.__main__ import main
main()
"""


def shell(line: str) -> tuple[int, str]:
    """Exit code of the program, and what it said on stderr."""
    command = ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("module", ["whichlora.cli", "click", "whichlora.terminal"])
def test_an_interrupt_while_modules_are_loaded_is_one_line(module: str) -> None:
    script = INTERRUPTED_IMPORT.replace("MODULE", module)
    command = [sys.executable, "-c", script, "gpus"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("arguments", ["gpus", "gpus --json", "--help"])
def test_output_that_nobody_reads_ends_quietly(arguments: str) -> None:
    assert shell(f"{PROGRAM} {arguments} | true") == (141, "")


def test_a_closed_output_is_no_error_and_a_full_disk_is_one_line() -> None:
    assert shell(f"{PROGRAM} gpus >&-") == (0, "")
    code, said = shell(f"{PROGRAM} gpus > /dev/full")
    assert code == 2
    assert said == "the output can't be written (No space left on device); check the disk\n"
