"""The measured links of this machine as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whichlora.terminal.tables import new_table, open_console, print_whole, say
from whichlora.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from whichlora.workflow.own_links import OwnLinks


def print_own_links(own: OwnLinks) -> None:
    """The smallest and the largest tensor of each collective, then the host, and the file."""
    console = open_console()
    links = own.links
    sizes = [format_bytes(links.sizes_bytes[place]) for place in (0, -1)]
    columns = (sizes[0], sizes[1], "whole tensor/s")
    table = new_table("collective", "ranks", *columns, right=("ranks", *columns))
    for collective, by_count in links.seconds.items():
        for count, seconds in by_count.items():
            table.add_row(
                collective.replace("_", "-"),
                str(count),
                format_seconds(seconds[0]),
                format_seconds(seconds[-1]),
                f"{links.sizes_bytes[-1] / seconds[-1] / 1e9:.3g} GB",
            )
    say(console, links.name)
    print_whole(console, table)
    thread, node = links.host_thread_bytes_per_s, links.host_update_bytes_per_s
    if thread and node:
        say(
            console,
            f"host: each rank copies {links.host_bytes_per_s / 1e9:.3g} GB/s; an update moves "
            f"{thread / 1e9:.3g} GB/s in one thread, {node / 1e9:.3g} GB/s in all ranks",
        )
    say(console, f"kept in {own.path}; --interconnect overrides it", whole=True)
