"""The program: what may happen before a command runs, and after it has printed its answer."""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_EXIT_BAD_REQUEST, _EXIT_INTERRUPTED, _EXIT_UNREAD = 2, 130, 141


def main() -> NoReturn:
    """Run the command line; Ctrl-C ends it quietly at any time, importing included."""
    try:
        _replace_closed_streams()
        from whichlora.cli import main as command_line

        try:
            command_line(prog_name="whichlora")
        finally:
            sys.stdout.flush()  # an answer that can't be written is no success
    except KeyboardInterrupt:
        _end("interrupted", _EXIT_INTERRUPTED)
    except BrokenPipeError:
        _end("", _EXIT_UNREAD)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _end(f"the output can't be written ({error.strerror}); check the disk", _EXIT_BAD_REQUEST)
    sys.exit(0)


def _replace_closed_streams() -> None:
    """Let nothing that is opened later become the output: `whichlora … >&-` closed it."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _end(message: str, code: int) -> NoReturn:
    """End at once: no flush at the exit, which would meet the same error again."""
    if message:
        os.write(2, f"{message}\n".encode())
    os._exit(code)


def _forget_current_folder() -> None:
    """Import nothing from where the user is: `python -m` looks there first, whichlora does not."""
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


if __name__ == "__main__":
    _forget_current_folder()
    main()
