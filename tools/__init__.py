"""What makes the files of this repository that are made: the tiny model, its data, and llms.txt; and wheels for a machine
without a network. Nothing but tests imports it.
"""
