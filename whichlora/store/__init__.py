"""Reads and writes the data folders: models, accelerators and measurements."""
