"""Decoding on a CPU beside llama.cpp: `gss-small` and a Llama of the same size, in one process and by turns.

    pip install llama-cpp-python gguf
    python -m experiments.beside_llama --context 1024 --context 16384

Random weights, greedy, one sequence, the same threads. Each round decodes 64 tokens with one side and then with the
other, so that whatever else the machine does meets both; the figure is the median of the rounds' ratios. On a machine
that others use as well, `--processor-time --threads 1` leaves out the time in which neither side runs.
"""

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gss
from gss.decode import Decoder, read
from gss.nn.quantized import quantize

VOCABULARY, WIDTH, DEPTH, HEADS, INNER = 32_000, 512, 12, 8, 928
FORMATS = {"fp32": "F32", "int8": "Q8_0", "int4": "Q4_0"}
"""Our weights, and llama.cpp's of the same bits."""
TOKENS = 64


def write_llama(path: Path, kind: str) -> None:
    """A Llama of 45M parameters with tied embeddings and random weights."""
    import gguf
    from gguf import quants

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(DEPTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    quantized = gguf.GGMLQuantizationType[kind]
    numbers = np.random.default_rng(0)

    def add(name: str, outputs: int, inputs: int) -> None:
        weight = numbers.standard_normal((outputs, inputs), dtype=np.float32) * inputs**-0.5
        writer.add_tensor(f"{name}.weight", quants.quantize(weight, quantized), raw_dtype=quantized)

    add("token_embd", VOCABULARY, WIDTH)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(DEPTH):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}", WIDTH, WIDTH)
        add(f"blk.{layer}.ffn_gate", INNER, WIDTH)
        add(f"blk.{layer}.ffn_up", INNER, WIDTH)
        add(f"blk.{layer}.ffn_down", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama(path: Path, context: int, threads: int, room: int) -> Callable[[], None]:
    """What decodes a round of tokens after a context, with llama.cpp."""
    import llama_cpp as lc

    lc.llama_log_set(_quiet, ctypes.c_void_p(0))
    model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
    settings: Any = lc.llama_context_default_params()
    settings.n_ctx, settings.n_batch = context + room, 512
    settings.n_threads = settings.n_threads_batch = threads
    state = lc.llama_init_from_model(model, settings)

    def decode(tokens: np.ndarray) -> int:
        array = (ctypes.c_int32 * len(tokens))(*tokens.tolist())
        if lc.llama_decode(state, lc.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama.cpp could not decode")
        logits = np.ctypeslib.as_array(lc.llama_get_logits_ith(state, -1), shape=(VOCABULARY,))
        return int(logits.argmax())

    prompt = np.random.default_rng(1).integers(0, VOCABULARY, context)
    token = [decode(part) for part in np.array_split(prompt, -(-context // 512))][-1]

    def run() -> None:
        nonlocal token
        for _ in range(TOKENS):
            token = decode(np.array([token]))

    return run


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _quiet(*_: Any) -> None:
    pass


@torch.no_grad()
def ours(weights: str, context: int) -> Callable[[], None]:
    """What decodes a round of tokens after a context, with `gss-small`."""
    model = gss.build_model(gss.preset("gss-small"), seed=0).eval()
    state = read(model, torch.randint(0, VOCABULARY, (1, context)))[1]
    if weights != "fp32":
        quantize(model, weights)
    decoder = Decoder(model, state)
    decoder.generate(1, torch.zeros(1, dtype=torch.int64))

    def run() -> None:
        decoder.generate(TOKENS)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding on a CPU beside llama.cpp.")
    parser.add_argument("--context", type=int, action="append", help="tokens read before; repeatable")
    parser.add_argument("--weights", choices=FORMATS, action="append", help="repeatable; default: all")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="of the process; with one thread")
    options = parser.parse_args()
    clock = time.process_time if options.processor_time else time.perf_counter
    torch.set_num_threads(options.threads)
    for context in options.context or [1024]:
        for weights in options.weights or FORMATS:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "llama.gguf"
                write_llama(path, FORMATS[weights])
                sides = [ours(weights, context), llama(path, context, options.threads, (options.rounds + 2) * TOKENS)]
                seconds: list[list[float]] = []
                for _ in range(options.rounds + 1):  # the first is left out
                    pair = []
                    for run in sides:
                        started = clock()
                        run()
                        pair.append(clock() - started)
                    seconds.append(pair)
            speeds = [TOKENS / statistics.median(side) for side in zip(*seconds[1:], strict=True)]
            ratio = statistics.median(theirs / own for own, theirs in seconds[1:])
            print(
                f"after {context:,}: gss-small {weights} {speeds[0]:,.0f} tokens/s, "
                f"llama.cpp {FORMATS[weights]} {speeds[1]:,.0f}, median ratio {ratio:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
