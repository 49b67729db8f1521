"""How fast a model is on this machine: training steps, prefill and decoding, in tokens per second.

models (what is timed) → check (correctness before speed), machine (timing, and where figures come from)
"""
