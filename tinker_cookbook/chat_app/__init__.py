"""A chat on the terminal, under the public package's path."""
