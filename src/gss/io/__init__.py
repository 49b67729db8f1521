"""Files and devices: atomic files, checkpoints, run folders, states.

Reading a run needs nothing of training. `files` knows nothing of models and imports no torch, so any part may use it.
"""
