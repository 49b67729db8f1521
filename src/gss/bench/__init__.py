"""Measurements on the machine at hand: each checks its subject first, times it, and gives rows of one shape.

models (training, prefill, decoding), layer, data -> results (rows, the header above them, the table)
"""
