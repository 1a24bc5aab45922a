"""One run, or arrays of millions of runs: memory, time and verdict."""
