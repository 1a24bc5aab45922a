"""Run the real code of one rank among several on fake tensors: a tool of the `*_traces.py`."""
