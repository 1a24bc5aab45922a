"""Peak memory: a ledger of the tensors that are alive at each moment that can be the peak."""
