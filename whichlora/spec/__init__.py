"""The values that all packages speak in: models, runs, devices, plans and results."""
