"""Decoding on a CPU beside llama.cpp: `gss-small`, `gss2-small` and a Llama of the same size, in one process by turns.

    pip install llama-cpp-python gguf
    python -m experiments.beside_llama --context 1024 --context 16384

Random weights, greedy, one sequence, the same threads. Each round decodes 64 tokens with one side and then with the
others, so that whatever else the machine does meets all; a ratio is the median of the rounds'. On a machine that others
use as well, `--processor-time --threads 1` leaves out the time in which neither side runs. It prints a table in
Markdown, a row as soon as it is measured.
"""

import argparse
import ctypes
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
from gss.ops.cpu.pages import use_large_pages

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
def ours(preset: str, weights: str, context: int) -> Callable[[], None]:
    """What decodes a round of tokens after a context, with one of our models."""
    model = gss.build_model(gss.preset(preset), seed=0).eval()
    state = read(model, torch.randint(0, VOCABULARY, (1, context)))[1]
    if weights != "fp32":
        quantize(model, weights)
    use_large_pages(model)  # as `gss.load` does
    decoder = Decoder(model, state)
    decoder.generate(1, torch.zeros(1, dtype=torch.int64))

    def run() -> None:
        decoder.generate(TOKENS)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding on a CPU beside llama.cpp.")
    parser.add_argument("--context", type=int, action="append", help="tokens read before; repeatable")
    parser.add_argument("--weights", choices=FORMATS, action="append", help="repeatable; default: all")
    parser.add_argument("--model", action="append", help="a preset of ours; repeatable; default: gss-small, gss2-small")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="of the process; with one thread")
    options = parser.parse_args()
    clock = time.process_time if options.processor_time else time.perf_counter
    torch.set_num_threads(options.threads)
    presets = options.model or ["gss-small", "gss2-small"]
    print(f"tokens per second | {' | '.join(presets)} | llama.cpp | {' | '.join(f'{name}, times' for name in presets)}")
    print("|".join(["---"] * (2 + 2 * len(presets))))
    for context in options.context or [1024]:
        for weights in options.weights or FORMATS:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "llama.gguf"
                write_llama(path, FORMATS[weights])
                sides = [ours(preset, weights, context) for preset in presets]
                sides.append(llama(path, context, options.threads, (options.rounds + 2) * TOKENS))
                seconds = np.array([[_timed(run, clock) for run in sides] for _ in range(options.rounds + 1)])[1:]
            speeds = [f"{speed:,.0f}" for speed in TOKENS / np.median(seconds, axis=0)]
            ratios = [f"{ratio:.2f}" for ratio in np.median(seconds[:, -1:] / seconds[:, :-1], axis=0)]
            print(" | ".join([f"after {context:,}, {weights}, {FORMATS[weights]}", *speeds, *ratios]), flush=True)


def _timed(run: Callable[[], None], clock: Callable[[], float]) -> float:
    started = clock()
    run()
    return clock() - started


if __name__ == "__main__":
    main()
