"""What a command does, from names and files to answers and files."""
