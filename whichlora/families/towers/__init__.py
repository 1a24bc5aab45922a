"""Vision towers, one file per kind of processor: a vision config in, blocks and a grid out."""
