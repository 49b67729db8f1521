"""The mathematics, as functions on tensors. There are no parameters here.

Shape letters, here and in `gss.nn`: B batch, L length, E width, F gate width, H state-space channels,
N modes, G groups of modes (1 when every channel shares them, H when each channel has its own).
"""
