"""Every kernel of `gss.ops.gpu` against plain float64, outputs and gradients.

On a CUDA device they run there (`pytest -m gpu`); elsewhere in Triton's interpreter, at small sizes.
"""

import copy
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gss
from gss.choices import ACTIVATIONS
from gss.nn.dense import norm as norm_layer
from gss.nn.state_space import DiagonalStateSpace
from gss.ops import fast, reference
from gss.ops.gate import add_gated
from gss.ops.state_space import discretize, eigenvalues, kernel
from gss.ops.vandermonde import evaluate, project
from tests.comparing import relative_error

pytest.importorskip("triton")
from gss.ops.gpu import channel_powers, cross_entropy, fft, gate, long, powers, stream, taps, transpose

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALF = 1e-3  # float16 operands, a few roundings deep
pytestmark = [pytest.mark.gpu] if ON_GPU else []


def draw(*shape: int, kind: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(kind).to(DEVICE)


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output, then its gradient by each input."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def compare(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert relative_error(a.cpu(), b.cpu()) < tolerance, i


def taps_and_gradients(parameters: list[Tensor], grad: Tensor, exponentiated: bool) -> list[Tensor]:
    """The kernel from log_decay, frequency, readout and skip, then the gradient with respect to each."""
    log_decay, frequency, readout, skip = (t.to(DEVICE) for t in parameters)
    modes, drive = taps.modes_and_drive(log_decay, frequency, exponentiated)
    table = powers.table_of(modes, grad.shape[1])
    out = taps.from_modes(drive, table, readout, skip)
    return [out, *taps.gradients_of(grad.to(DEVICE), modes, drive, table, readout, exponentiated)]


def by_definition(signal: Tensor, taps: Tensor) -> Tensor:
    """Each row of [B, H, L] convolved alone, in float64."""
    row = taps.shape[1]
    pieces = signal.double().split(row, dim=-1)
    done = [reference.convolve(piece.transpose(1, 2), taps.double()[:, : piece.shape[-1]]) for piece in pieces]
    return torch.cat(done, dim=1).transpose(1, 2)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 513, 1021, 1100, *([4095, 4096, 9000] if ON_GPU else [])])
def test_rows_are_convolved_alone(batch: int, length: int) -> None:
    row = fft.row_length(length)
    signal, grad = draw(batch, 2, length), draw(batch, 2, length, scale=1e-6)
    kernels = draw(2, row) * torch.exp(-torch.arange(row, device=DEVICE) / 100)
    found = gradients(fft.convolve_rows, [signal, kernels], grad)
    expected = gradients(by_definition, [signal.double().cpu(), kernels.double().cpu()], grad.double().cpu())
    compare(found, expected, HALF)


def test_zeros_are_convolved_to_zeros() -> None:
    silent = torch.zeros(1, 1, 600, device=DEVICE)
    assert torch.equal(fft.convolve_rows(silent, torch.zeros(1, 1024, device=DEVICE)), silent)


@pytest.mark.parametrize("scale", [1e-33, 1e-40, 1e-44])
def test_rows_next_to_zero(scale: float) -> None:
    """As gradients are behind an activation that is shut: a reciprocal of their largest would be infinite."""
    signal, kernels = draw(2, 2, 600), draw(2, 1024)
    grad = draw(2, 2, 600)
    grad[:, 1] *= scale
    out, by_signal, by_taps = gradients(fft.convolve_rows, [signal, kernels], grad)
    assert all(found.isfinite().all() for found in (out, by_signal, by_taps))
    assert by_signal[:, 1].abs().max() <= 1e-30
    assert by_taps[1].abs().max() <= 1e-28
    tiny = torch.stack([signal[:, 0], signal[:, 1] * scale], dim=1)
    out = fft.convolve_rows(tiny, kernels)
    assert torch.equal(out[:, 0], fft.convolve_rows(signal, kernels)[:, 0])
    assert out[:, 1].abs().max() <= 1e-30


@pytest.mark.parametrize(("biased", "keep"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("activation", gate.ACTIVATIONS)
def test_gate(activation: str, biased: bool, keep: bool) -> None:
    tokens, wide, narrow, width = 150, 136, 24, 40
    half = torch.float16
    inputs = [
        draw(tokens, wide, kind=half, scale=2.0),
        draw(tokens, narrow, kind=half),
        draw(wide, narrow, kind=half, scale=narrow**-0.5),
        draw(width, wide, kind=half, scale=wide**-0.5),
        *(draw(wide, kind=half) for _ in range(2 * biased)),
    ]

    def on_gpu(g: Tensor, y: Tensor, w3: Tensor, w4: Tensor, *biases: Tensor) -> Tensor:
        b2, b3 = biases or (None, None)
        return gate.gated_output(g, b2, y, w3, b3, w4, activation, keep)[0]

    def plainly(g: Tensor, y: Tensor, w3: Tensor, w4: Tensor, *biases: Tensor) -> Tensor:
        b2, b3 = biases or (0, 0)
        return (ACTIVATIONS[activation](g + b2) * (y @ w3.T + b3)) @ w4.T

    grad = draw(tokens, width, kind=half)
    expected = gradients(plainly, [t.double() for t in inputs], grad.double())
    compare(gradients(on_gpu, inputs, grad), expected, HALF)


def test_a_layer_that_keeps_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same gradients; without a gradient it keeps nothing."""
    monkeypatch.setattr(fast, "half", lambda tensor: tensor.dtype)
    layer = gss.build_model(gss.preset("gss-tiny", depth=1)).to(DEVICE).layers[0]
    x = draw(2, 40, 128).requires_grad_()
    found, called, call = [], [], gate.gated_output
    monkeypatch.setattr(gate, "gated_output", lambda *inputs: called.append(call(*inputs)) or called[-1])
    for layer.keep_products in (False, True):
        out, _ = layer(x)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.no_grad():
        layer(x)
    assert [len(kept) for _, *both in called for kept in both] == [0, 0, 80, 80, 0, 0]


def test_an_activation_that_the_kernels_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels refuse it; the layer leaves it to PyTorch."""
    g, y, w3, w4 = draw(80, 24), draw(80, 16), draw(24, 16), draw(8, 24)
    with pytest.raises(Exception) as refused:  # noqa: PT011 (on a GPU it is the cause of a compiler's error)
        gate.gated_output(g, None, y, w3, None, w4, "cosine")
    error, said = refused.value, ""
    while error is not None:
        said, error = said + str(error), error.__cause__ or error.__context__
    assert "an activation that the kernels do not have" in said
    monkeypatch.setitem(ACTIVATIONS, "cosine", torch.cos)
    monkeypatch.setattr(fast, "half", lambda tensor: tensor.dtype)
    layer = gss.build_model(gss.preset("gss-tiny", activation="cosine", depth=1)).to(DEVICE).layers[0]
    x = draw(2, 40, 128)
    out = add_gated(x, x, x[..., :32], layer.gate, layer.context, layer.output, "cosine")
    expected = layer.output(layer.context(x[..., :32]) * torch.cos(layer.gate(x))) + x
    assert torch.equal(out, expected)


def test_a_mode_that_stands_still() -> None:
    """λ = 0: the kernels take the limits, of the taps and of their gradients."""
    log_decay, frequency = torch.tensor([-torch.inf, -1.0]), torch.tensor([0.0, 0.5])
    readout, skip = torch.randn(3, 2, 2), torch.randn(3)

    def plainly(*parameters: Tensor) -> Tensor:
        log_decay, frequency, readout, skip = parameters
        log_a, drive = discretize(eigenvalues(log_decay, frequency, "plain"), None, "zoh")
        return kernel(torch.view_as_complex(readout) * drive, log_a, 512, skip)

    grad = torch.randn(3, 512) * torch.exp(-torch.arange(512) / 100)
    inputs = [log_decay, frequency, readout, skip]
    found = taps_and_gradients(inputs, grad, False)
    compare(found, gradients(plainly, [t.double() for t in inputs], grad.double()), HALF)


def test_gate_takes_what_is_not_contiguous() -> None:
    """In decoding, y comes transposed out of an einsum."""
    g, y, w3, w4 = draw(80, 24), draw(16, 80).T, draw(24, 16), draw(8, 24)
    found, *_ = gate.gated_output(g, None, y, w3, None, w4, "relu")
    assert relative_error(found.cpu(), ((g.relu() * (y @ w3.T)) @ w4.T).cpu()) < (2e-3 if ON_GPU else 1e-5)


@pytest.mark.parametrize("vocabulary", [1, 5, 1000, 40_000])
def test_cross_entropy(vocabulary: int) -> None:
    logits = draw(5, vocabulary, scale=3.0)
    targets = torch.randint(0, vocabulary, (5,), device=DEVICE)
    targets[2] = -100
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets, ignore_index=-100, reduction="none")
    expected.sum().backward()
    losses = cross_entropy.cross_entropy_(logits, targets, -100)
    assert torch.allclose(losses.double(), expected, atol=1e-5)
    assert exact.grad is not None
    assert torch.allclose(logits.double(), exact.grad, atol=1e-6)


@pytest.mark.parametrize(("groups", "rows", "modes", "length"), [(3, 1, 33, 100), (2, 2, 20, 4097), (5, 3, 70, 1)])
def test_sums_of_powers_per_channel(groups: int, rows: int, modes: int, length: int) -> None:
    decay, angle = torch.rand(2, groups, modes).double()
    log_a = torch.complex(-decay * 0.01, angle * 6).to(DEVICE)
    weights, values = draw(groups, rows, modes, kind=torch.complex64), draw(groups, rows, length)
    with fast.disabled():
        taps_expected = evaluate(weights.to(torch.complex128), log_a, length)
        modes_expected = project(values.double(), log_a)
    compare([channel_powers.evaluate(weights, log_a, length)], [taps_expected], 1e-6)
    compare([channel_powers.evaluate(weights.conj(), log_a.conj().resolve_conj(), length)], [taps_expected], 1e-6)
    compare([torch.view_as_real(channel_powers.project(values, log_a))], [torch.view_as_real(modes_expected)], 1e-6)


def test_powers_keep_their_phase_far_out() -> None:
    log_a = torch.tensor([[-1e-6 + 3.0j]], dtype=torch.complex128, device=DEVICE).expand(1, 4).contiguous()
    weights = torch.zeros(1, 2, 4, dtype=torch.complex64, device=DEVICE)
    weights[..., 0] = 1
    length = 65_537 if ON_GPU else 4_097
    found = channel_powers.evaluate(weights, log_a, length)[0, 0, -64:]
    exponent = torch.arange(length - 64, length, device=DEVICE)
    assert (found - torch.exp(log_a[0, 0] * exponent).real).abs().max() < 1e-5


@pytest.mark.parametrize("imaginary", ["exp", "plain"])
def test_taps_from_parameters(imaginary: str) -> None:
    config = gss.preset("gss-tiny", state_space={"imaginary": imaginary, "modes": 24}).state_space
    space = DiagonalStateSpace(5, config)
    inputs = [p.detach() for p in (space.log_decay, space.frequency, space.readout, space.skip)]

    def plainly(log_decay: Tensor, frequency: Tensor, readout: Tensor, skip: Tensor) -> Tensor:
        eigenvalue = reference.eigenvalues(log_decay, frequency, imaginary)
        taps = reference.kernel(torch.view_as_complex(readout), eigenvalue, 512)
        return torch.cat([taps[:, :1] + skip[:, None], taps[:, 1:]], dim=1)

    grad = torch.randn(5, 512) * torch.exp(-torch.arange(512) / 100)
    found = taps_and_gradients(inputs, grad, imaginary == "exp")
    compare(found, gradients(plainly, [t.double() for t in inputs], grad.double()), HALF)


@pytest.mark.parametrize("ends", ["alone", "before", "after", "before and after"])
@pytest.mark.parametrize(("batch", "length"), [(1, 2), (2, 300), (1, 1024), (2, 1025)])
def test_long_signals_in_rows(batch: int, length: int, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 512, a rest, states at either end, against the recurrence in float64."""
    monkeypatch.setattr(fft, "LONGEST", 512)
    keep = "after" in ends
    space = DiagonalStateSpace(3, gss.preset("gss-tiny", state_space={"modes": 24}).state_space)
    signal = torch.randn(batch, 3, length).half()
    before = torch.randn(batch, 3, 24, 2) if "before" in ends else None
    weights = torch.randn(batch, 3, length), torch.randn(batch, 3, 24, 2) / length

    def scalar(y: Tensor, after: Tensor | None) -> Tensor:
        total = (y.double() * weights[0].to(y.device)).sum()
        return total if after is None else total + (after.double() * weights[1].to(y.device)).sum()

    exact = {name: p.detach().double().requires_grad_() for name, p in space.named_parameters()}
    transition, drive = reference.discretize(reference.eigenvalues(exact["log_decay"], exact["frequency"]))
    u = signal.double().requires_grad_()
    start = None if before is None else before.double().requires_grad_()
    y, state = reference.recur(
        u.transpose(1, 2),
        torch.view_as_complex(exact["readout"]),
        transition,
        drive,
        None if start is None else torch.view_as_complex(start),
    )
    y, state = y.transpose(1, 2) + exact["skip"][:, None] * u, torch.view_as_real(state)
    scalar(y, state if keep else None).backward()

    space = space.to(DEVICE)
    v = signal.to(DEVICE).requires_grad_()
    given = None if before is None else before.to(DEVICE).requires_grad_()
    found, after = space._mix_on_gpu(v.transpose(1, 2), given, keep)
    found = found.transpose(1, 2)
    assert (after is None) is not keep
    scalar(found, after).backward()
    pairs = {"y": (found, y), "u": (v.grad, u.grad)}
    pairs |= {name: (parameter.grad, exact[name].grad) for name, parameter in space.named_parameters()}
    if after is not None:
        pairs["after"] = (after, state)
    if given is not None and start is not None:
        pairs["before"] = (given.grad, start.grad)
    for name, (a, b) in pairs.items():
        assert a is not None
        assert b is not None
        # The eigenvalues' gradients are sums over everything, in which much cancels.
        tolerance = 5 * HALF if name in ("log_decay", "frequency") else 2 * HALF
        assert relative_error(a.detach().cpu(), b.detach()) < tolerance, name


def test_a_state_after_that_nothing_depends_on() -> None:
    """As in lanes, where the next step's gradient does not reach back: the same as if it were not kept."""
    space = DiagonalStateSpace(3, gss.preset("gss-tiny", state_space={"modes": 24}).state_space).to(DEVICE)
    parameters = [space.log_decay, space.frequency, space.readout, space.skip]
    signal, grad, state = draw(2, 3, 70, kind=torch.float16), draw(2, 3, 70), draw(2, 3, 24, 2)
    found, expected = (
        gradients(
            lambda *inputs, keep=keep: long.mix_long(*inputs[:5], True, inputs[5], keep)[0],
            [signal, *parameters, state],
            grad,
        )
        for keep in (True, False)
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_what_a_compiler_is_told_of_an_operation_with_states() -> None:
    """Shapes, kinds and gradients without data, against what it does."""
    space = DiagonalStateSpace(2, gss.preset("gss-tiny", state_space={"modes": 8}).state_space).to(DEVICE)
    signal, state = draw(1, 2, 70, kind=torch.float16).requires_grad_(), draw(1, 2, 8, 2).requires_grad_()
    parameters = (space.log_decay, space.frequency, space.readout, space.skip, True)
    torch.library.opcheck(long.mix_long.op, (signal, *parameters, state, True), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("shape", [(3, 5, 24), (1, 7, 1000), (2, 1, 4100)])
def test_norms(shape: tuple[int, ...], kind: str) -> None:
    norm = norm_layer(shape[-1], gss.preset("gss-tiny", norm=kind))
    torch.nn.init.normal_(norm.weight)
    bias = getattr(norm, "bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias)
    x = torch.randn(shape) * 3 + 1
    exact, norm = copy.deepcopy(norm).double(), norm.to(DEVICE)
    found = stream.normalize_to(
        x.to(DEVICE), norm.weight, getattr(norm, "bias", None), norm.eps, kind == "layernorm", torch.float16
    )
    assert found.dtype == torch.float16
    compare([found], [exact(x.double())], HALF)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 24), (1, 5, 1000)])
def test_sums_of_the_stream(shape: tuple[int, ...], biased: bool) -> None:
    x, update, bias = draw(*shape), draw(*shape, kind=torch.float16), draw(shape[-1])
    found = stream.added(x, update, bias if biased else None)
    compare([found], [x.double() + update.double() + biased * bias.double()], 1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 65, 130), (3, 64, 7)])
def test_transposed_copies(shape: tuple[int, int, int]) -> None:
    x = draw(*shape)
    assert torch.equal(transpose.contiguous(x.transpose(1, 2)), x.transpose(1, 2).contiguous())
    assert torch.equal(transpose.contiguous(x), x)
    found = gradients(transpose.swapped, [x], x.transpose(1, 2))
    assert torch.equal(found[0], x.transpose(1, 2))
    assert torch.equal(found[1], x)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, device=DEVICE)
    with fast.disabled():
        assert not fast.usable(DEVICE)
        assert fast.half(x.bfloat16()) is None
    assert fast.usable(DEVICE) is ON_GPU
    assert fast.half(x) is None  # nobody asked for 16 bits
    assert not fast.usable(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert [fast.usable(torch.device(name)) for name in ("cuda", "cuda:0", "cuda:1")] == [True, False, True]


@pytest.mark.parametrize("form", [{"step_range": [0.01, 0.1]}, {"discretization": "bilinear"}])
def test_other_forms_than_the_papers(form: dict[str, object]) -> None:
    """A step per channel, and another discretisation: in one row without states by kernels, else plainly."""
    space = DiagonalStateSpace(3, gss.preset("gss-tiny", state_space={"modes": 16, **form}).state_space)
    signal, state = torch.randn(2, 300, 3).half(), torch.randn(2, 3, 16, 2)
    for before, keep in ((None, False), (state, True)):
        with torch.no_grad():
            expected, after = (
                space.cpu().double()._mix(signal.double(), None if before is None else before.double(), keep)
            )
            space = space.float().to(DEVICE)
            found = space._mix_on_gpu(signal.to(DEVICE), None if before is None else before.to(DEVICE), keep)
        assert relative_error(found[0].cpu(), expected) < HALF
        assert (found[1] is None) is not keep
        if after is not None and found[1] is not None:
            assert relative_error(found[1].cpu(), after) < HALF


INFERENCE = """
import sys
import threading
import torch
import gss
from gss.ops import fast
fast.usable = lambda device: True
thread = threading.Thread(target=fast.prepare, args=[torch.device("cpu")])
thread.start()
thread.join()
layers = {"pattern": ("gss2", "gss", "attention"), "depth": 3, "zero_outputs": False, "attention": {"sliding": None}}
sizes = {"vocab_size": 61, "width": 16, "gate_width": 16, "channels": 2, "state_space": {"modes": 2}}
model = gss.build_model(gss.preset("gss2-tiny", **layers, **sizes))
called, call = set(), fast.Operation.__call__
fast.Operation.__call__ = lambda self, *given: called.add(self.op._qualname) or call(self, *given)
with torch.no_grad(), torch.autocast("cpu", torch.float16):
    model(torch.zeros(1, 64, dtype=torch.int64))
expected = {"swapped", "short_mix", "matrix_scan", "mix_long", "gated_output", "rotary_table"}
assert called == {f"gss::{name}" for name in expected}, called
assert not {"torch._dynamo", "sympy", "torch.distributed.fsdp", "torch.distributed.tensor"} & sys.modules.keys()

from gss.ops.gpu.transpose import swapped
x = torch.randn(2, 3, 4, requires_grad=True)
swapped(x).backward(weight := torch.randn(2, 4, 3))
assert torch.equal(x.grad, weight.transpose(1, 2))
assert "torch._dynamo" in sys.modules
"""


@pytest.mark.skipif(ON_GPU, reason="the interpreter is for machines without a GPU")
def test_inference_does_not_import_the_compiler() -> None:
    """That is the greater part of the time to the first token. What is differentiated goes through the operation."""
    subprocess.run([sys.executable, "-c", INFERENCE], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
