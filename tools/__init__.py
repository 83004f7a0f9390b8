"""Generators of this repository's generated files (the tiny models, their data, llms.txt), and of wheels for a machine without a
network. Only tests import it.
"""
