"""Short runs of the real code in a child process, measured."""
