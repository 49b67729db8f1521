"""Measurements on this machine: each checks correctness first, then measures time, and returns rows of one shape.

models (training, prefill, decoding) → check, measure → results (rows, the header above them, the table)
"""
