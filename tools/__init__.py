"""What makes the files of this repository that are made: the tiny model, its data, and llms.txt. Nothing but tests imports it."""
