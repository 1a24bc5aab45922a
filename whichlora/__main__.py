"""`python -m whichlora`."""

from whichlora.cli import main

main()
