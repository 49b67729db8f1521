"""Measurements: each module times one thing beside a peer in one run and returns rows; the CLI prints them."""
