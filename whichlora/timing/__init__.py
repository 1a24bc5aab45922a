"""The work of one step, and the seconds that a device takes for it."""
