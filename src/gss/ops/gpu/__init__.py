"""GPU kernels, written in Triton: each module here speeds up the module of `gss.ops` that its own docstring names.

Nothing outside `gss.ops` and the decoder imports these; `gss.ops.fast.usable` says when they may be.
"""
