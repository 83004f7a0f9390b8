"""Tasksets of the package verifiers (0.4): train on them, and offer our environments as such tasksets.

`dataset` and `config` import the package on use; the other modules at the top. It is the extra `verifiers`.
"""
