"""What is here and what it does when a run is tried: detection, building, profiling."""
