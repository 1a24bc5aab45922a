"""`whichlora mcp`: a server for assistants."""

from __future__ import annotations

import click


@click.command()
def mcp() -> None:
    """Answer assistants on stdin and stdout (Model Context Protocol).

    Tools: estimate, explain, where, recommend, models, gpus. Needs the extra `mcp`.
    docs/integrations.md shows how a client starts it.

    \b
    Examples:
      whichlora mcp
      claude mcp add whichlora -- whichlora mcp
    """
    from whichlora.mcp_server import serve

    serve()
