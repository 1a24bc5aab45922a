"""Exit codes, and every error of ours or of click in one line."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from whichlora.errors import InfeasibleError, WhichLoraError
from whichlora.text import visible

EXIT_NOTHING_FITS = 1
EXIT_BAD_REQUEST = 2
EXIT_UNREAD = 141  # as a shell says of SIGPIPE
EXIT_INTERRUPTED = 130  # as a shell says of SIGINT; click's own 1 would mean that nothing fits


class OneLine(click.ClickException):
    """An error that is told in one line on stderr, without the usage that click adds."""

    exit_code = EXIT_BAD_REQUEST

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(visible(self.message, keep="\n"), err=True)


class NothingFits(OneLine):
    """No candidate meets the limits."""

    exit_code = EXIT_NOTHING_FITS


class Interrupted(OneLine):
    """Ctrl-C."""

    exit_code = EXIT_INTERRUPTED


@contextmanager
def goes_on_with(*command: str) -> Iterator[None]:
    """Ctrl-C in the block names the command that goes on from what is kept by then."""
    try:
        yield
    except KeyboardInterrupt:
        text = shlex.join(["whichlora", *command])
        raise Interrupted(f"interrupted; what was measured is kept, go on with: {text}") from None


class Unread(OneLine):
    """Whoever read the output has gone (`… | head`): nothing to tell, and nothing went wrong."""

    exit_code = EXIT_UNREAD

    def show(self, file: IO[Any] | None = None) -> None:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)  # what is still buffered has nowhere to go


class Group(click.Group):
    """Turns our errors and click's into one line; any other exception keeps its traceback."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _one_line():  # our own options
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line():  # those of the command, and its work
            return super().invoke(ctx)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    except BrokenPipeError:  # of which click would say 1, that nothing fits
        raise Unread("") from None
    except InfeasibleError as error:
        raise NothingFits(f"nothing fits: {error}") from None
    except WhichLoraError as error:
        raise OneLine(str(error)) from None
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "whichlora"
        text = _of_other_tools(error) or error.format_message()
        fault = " ".join(text.split()).rstrip(".")  # choices are in lines
        raise OneLine(f"{command}: {fault}; see '{command} --help'") from None


def _of_other_tools(error: click.UsageError) -> str:
    """The message on an option that other tools have; empty for all else."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    from whichlora.cli import other_names  # which a run without a fault does not need

    params = error.ctx.command.get_params(error.ctx)
    options = {each for param in params for each in param.opts}
    if meant := other_names.meant_by(error.option_name, options):
        return f"{error.message} Did you mean {meant!r}?"
    no_say = other_names.has_no_say(error.option_name)
    return f"{error.message.rstrip('.')}: {other_names.NO_SAY}" if no_say else ""
