"""Benchmarks of a model on this machine: training steps, prefill and decoding, in tokens per second.

models (what is timed) → check (correctness before speed), machine (timing, and the provenance of figures)
"""
