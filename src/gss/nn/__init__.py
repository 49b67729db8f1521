"""Modules with parameters. Every sequence layer keeps one contract: `layer(x, state) -> (y, state)`; see `state`."""
