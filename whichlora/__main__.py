"""`python -m whichlora`."""

from whichlora.cli import main

main(prog_name="whichlora")
