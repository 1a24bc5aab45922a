"""A static site that answers in the browser, with the same Python.

This package is imported there, too, so it names nothing here.
"""
