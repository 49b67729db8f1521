"""GPU kernels, written in Triton: each module here speeds up what its own docstring names.

`gss.ops.fast` says when they may be imported.
"""
