"""How fast a run will be, found out by taking a few of its steps on random tokens; and a layout of it that fits.

On a GPU the micro-batch is halved until it fits, and a model that does not compile is run as it is; on a CPU the
number of threads is chosen. None of it changes what is computed beyond rounding. What was compiled stays for the run
that follows.
"""

import gc
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch

from gss.bench.measure import intervals, release
from gss.data import Batch
from gss.model import build_model
from gss.reproduce.results import Layout
from gss.train.config import TrainConfig
from gss.train.distributed import World
from gss.train.step import Stepper

_STEPS = 3
# Training estimates are exact to some percent; scoring takes about a third of a training step's time a token.
_MARGIN = 1.1
_SCORING = 2.0
_START_SECONDS = {"cuda": 15.0, "cpu": 1.0}  # reading the data, building, the last checkpoint and reading it back
_COMPILE_SECONDS = 30.0


def probe(config: TrainConfig, device: torch.device, say: Callable[[str], None], threads: int = 1) -> Layout:
    """The first layout that works, with its speed. On a CPU torch is left with one or `threads` threads, whichever
    was faster: on a busy machine several threads of a small model mostly wait for each other. 1: as many as it has."""
    if device.type == "cpu" and threads > 1:
        speeds = {}
        for count in (1, threads):
            torch.set_num_threads(count)
            speeds[count] = _tokens_per_second(config, device)
        best = max(speeds, key=lambda count: speeds[count])
        torch.set_num_threads(best)
        return Layout(False, config.micro_batch_tokens, speeds[best])
    compiled = config.compile and device.type == "cuda"
    micro = config.micro_batch_tokens
    while True:
        try:
            speed = _tokens_per_second(replace(config, compile=compiled, micro_batch_tokens=micro), device)
        except torch.OutOfMemoryError:
            smaller = min(micro or config.batch_tokens, config.batch_tokens) // 2 // config.length * config.length
            if not smaller:
                raise ValueError(f"not even one row of {config.length:,} tokens of {config.preset} fits") from None
            say(f"{config.preset}: out of memory, trying micro-batches of {smaller:,} tokens")
            micro = smaller
            release(device)
        except Exception as error:
            if not compiled:
                raise
            say(f"{config.preset} does not compile here ({type(error).__name__}), running it as it is")
            compiled = False
            release(device)
        else:
            free(device)
            return Layout(compiled, micro, speed)


def free(device: torch.device) -> None:
    """Give back memory that nothing refers to any more; compiled code stays, for the next run of the same shape."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _tokens_per_second(config: TrainConfig, device: torch.device) -> float:
    torch.manual_seed(0)
    stepper = Stepper(build_model(config.model), config, World(device))
    tokens = torch.randint(0, config.model.vocab_size, (config.rows, config.length + 1), device=device)
    mask = torch.ones(config.rows, config.length, dtype=torch.bool, device=device)
    starts = torch.zeros_like(mask)
    starts[:, 0] = True
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, starts, 0, 0)
    seconds = intervals(lambda: stepper.step(batch, 0), _STEPS, device, warmup=2 if device.type == "cuda" else 1)
    return config.batch_tokens / statistics.median(seconds)


def seconds_needed(
    layout: Layout, training_tokens: int, scored_tokens: int, device: torch.device, compiled: bool = True
) -> float:
    """About how long it takes to train on so many tokens and score so many, with something to spare.

    compiled        whether what the layout compiles has been compiled in this process
    """
    work = (training_tokens + scored_tokens / _SCORING) / layout.tokens_per_second
    start = _START_SECONDS[device.type] + (_COMPILE_SECONDS if layout.compile and not compiled else 0.0)
    return (start if training_tokens else 0.0) + _MARGIN * work
