"""What is on disk and on which device: atomic files, checkpoints, run folders, states, devices.

Reading a run needs nothing of training. `files` knows nothing of models and imports no torch: any part may use it.
"""
