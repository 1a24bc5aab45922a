"""Profiling on many machines at once: what is worth it, as batch jobs, and what came of it."""
