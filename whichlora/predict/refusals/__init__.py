"""What is refused before anything is predicted: one line each, by what it is about."""
