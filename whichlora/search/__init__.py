"""From many candidates to the one to use: pure decisions, without a device or a file."""
