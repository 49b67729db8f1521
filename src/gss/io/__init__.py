"""Files and devices: atomic files, checkpoints, run folders, states.

Reading a run does not need the training code. `files` imports no torch, so any part may use it.
"""
