"""WGSL kernels and the functions that record them, forward beside backward.

A binder `name(graph, inputs..., outputs..., *, settings)` checks shapes and adds one or more
dispatches to a graph. It computes nothing itself. Its docstring says `=` or `+=` for every output.
"""
