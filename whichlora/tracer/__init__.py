"""The real code on fake tensors: the peak of memory without weights or a GPU."""
