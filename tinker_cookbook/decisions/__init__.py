"""Decisions: a model's probabilities of given choices as a policy, trained by a proper scoring rule.

`rules` has the scores, `data` the rows, `train` the loop, `policy` the probabilities under frozen weights, and
`shipped` questions whose probabilities are known.
"""
