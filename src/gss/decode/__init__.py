"""Decoding: from prompts to tokens, on one engine.

`prefill` reads prompts, `blocked` steps through tokens (`cuda`: as CUDA graphs), `sampler` draws, and `engine` combines
them to serve requests that come and go. Its clients are `gss.generate` and `gss.serve`.
"""

from gss.decode.blocked import BLOCK, Decoder, decoder
from gss.decode.engine import Engine, stream
from gss.decode.prefill import read
from gss.decode.request import Output, Request
from gss.decode.sampler import GREEDY, Sampling

__all__ = ["BLOCK", "GREEDY", "Decoder", "Engine", "Output", "Request", "Sampling", "decoder", "read", "stream"]
