"""Modules with parameters. Every sequence layer follows the same contract, `layer(x, state) -> (y, state)`: `state`."""
