"""A Slurm cluster at arm's length: what it has, scripts for it, and how its jobs stand."""
