"""A trainer of AXRL's shape and without a model: what its worker answers is told by the files.

Its ``reproduce_spike`` has AXRL's contract: the same arguments, files and keys of the answer. The
norm that it tells is a figure of those files.
"""
