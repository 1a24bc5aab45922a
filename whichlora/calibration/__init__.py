"""Measured runs become coefficients; calibration databases are stored, shared and merged."""
