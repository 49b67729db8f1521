"""Candidates for a better family, as plain PyTorch: what mixes the tokens of a Llama-shaped model.

Every candidate is a stack of (norm → mixer → added, norm → SwiGLU → added) with a tied embedding, so that what differs
is the mixer alone. A pattern has a letter per layer:

    A   causal attention, rotary positions or none, over everything or a sliding window
    S   a state space with a diagonal transition: S_t = a_t·S_{t−1} + Δ_t·k_t v_tᵀ per head, y_t = q_t S_t, in chunks

For studies only: the winner becomes a layer of the package.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One model of the study."""

    pattern: str = "AAAAAAAAA"
    vocab: int = 32_128
    width: int = 512
    hidden: int = 1408
    """Of the feed-forward in layers with attention."""
    state_hidden: int = 1408
    """Of the feed-forward in layers with a state space."""
    heads: int = 8
    window: int = 4096
    rope: float = 500_000.0
    """Base of attention's rotary positions; 0: none."""
    qk_norm: bool = False
    attention_conv: bool = False
    """A short convolution of q, k and v in attention too."""
    attention_gate: bool = False
    state_heads: int = 4
    key_width: int = 64
    value_width: int = 128
    shared_keys: bool = False
    """One q and k for all heads of a state space."""
    selective: bool = True
    """Whether decays and input gates depend on the token."""
    conv: int = 4
    """Taps of the short convolution before a state space; 0: none."""
    state_rope: float = 0.0
    """Base of rotary positions of q and k in a state space (complex eigenvalues); 0: none."""
    modal: str = ""
    """real or complex: a decay, or a decay and a frequency, per key channel, which no token changes."""
    slowest: float = 1000.0
    """Longest time constant at the start, in tokens."""
    key_activation: bool = True
    zero_output: bool = False
    chunk: int = 64
    softcap: float = 0.0


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-6)


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary positions of [B, L, h, d]."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class ShortConv(nn.Module):
    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(taps, width))
        with torch.no_grad():
            self.taps.normal_(0, 1 / math.sqrt(taps) / 4)
            self.taps[0] += 1

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.taps[0].to(x.dtype)
        for k in range(1, self.taps.shape[0]):
            y = y + F.pad(x[:, :-k], (0, 0, k, 0)) * self.taps[k].to(x.dtype)
        return y


def linear(inputs: int, outputs: int, std: float = 0.02) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, 0, std)
    return layer


def together(x: Tensor, *layers: nn.Linear) -> list[Tensor]:
    """Several products of one input as one; weights stay apart for the optimizer."""
    sizes = [layer.out_features for layer in layers]
    return list(F.linear(x, torch.cat([layer.weight for layer in layers])).split(sizes, dim=-1))


class Attention(nn.Module):
    def __init__(self, c: Candidate) -> None:
        super().__init__()
        self.c = c
        self.q, self.k, self.v = (linear(c.width, c.width) for _ in range(3))
        self.out = linear(c.width, c.width)
        self.conv = ShortConv(3 * c.width, 4) if c.attention_conv else None
        self.gate = linear(c.width, c.width) if c.attention_gate else None

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        if self.conv is not None:
            qkv = self.conv(torch.cat(together(x, self.q, self.k, self.v), dim=-1)).chunk(3, dim=-1)
        else:
            qkv = together(x, self.q, self.k, self.v)
        q, k, v = (t.unflatten(-1, (c.heads, -1)) for t in qkv)
        if c.qk_norm:
            q, k = rms(q), rms(k)
        if c.rope:
            q, k = rotate(q, c.rope), rotate(k, c.rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = windowed(q, k, v, c.window).transpose(1, 2).flatten(2)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x))
        return self.out(y)


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention of [B, h, L, d] over the last `window` tokens."""
    length = q.shape[2]
    if length <= window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    blocks = -(-length // window)
    pad = blocks * window - length
    q, k, v = (F.pad(t, (0, 0, 0, pad)).unflatten(2, (blocks, window)) for t in (q, k, v))
    k, v = (torch.cat([F.pad(t[:, :, :-1], (0, 0, 0, 0, 1, 0)), t], dim=3) for t in (k, v))
    i = torch.arange(window, device=q.device)[:, None]
    j = torch.arange(2 * window, device=q.device) - window
    mask = (j <= i) & (j > i - window)
    first = mask & (j >= 0)
    masks = torch.stack([first] + [mask] * (blocks - 1))  # [blocks, W, 2W]
    q, k, v = (t.permute(0, 2, 1, 3, 4).flatten(0, 1) for t in (q, k, v))
    masks = masks.repeat(q.shape[0] // blocks, 1, 1).unsqueeze(1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=masks)
    return y.unflatten(0, (-1, blocks)).permute(0, 2, 1, 3, 4).flatten(2, 3)[:, :, :length]


class Selective(nn.Module):
    """The selective state space, in chunks."""

    def __init__(self, c: Candidate) -> None:
        super().__init__()
        self.c = c
        keys = c.key_width * (1 if c.shared_keys else c.state_heads)
        values = c.value_width * c.state_heads
        self.q, self.k, self.v = linear(c.width, keys), linear(c.width, keys), linear(c.width, values)
        self.z = linear(c.width, values)
        self.out = linear(values, c.width)
        self.conv = ShortConv(2 * keys + values, c.conv) if c.conv else None
        self.decay = nn.Linear(c.width, c.state_heads) if c.selective and not c.modal else None
        if c.modal:
            shape = (c.state_heads, c.key_width // 2)
            constant = torch.exp(torch.rand(shape) * math.log(c.slowest / 2)) * 2
            self.log_rate = nn.Parameter(-constant.log())
            self.log_frequency = nn.Parameter(torch.empty(shape).uniform_(math.log(1e-3), math.log(1.0)))
        rate = torch.exp(torch.linspace(0, 1, c.state_heads) * math.log(c.slowest)).reciprocal()  # 1 … 1/slowest
        self.dt_bias = nn.Parameter(rate + torch.log(-torch.expm1(-rate)))  # softplus⁻¹
        self.log_a = nn.Parameter(torch.zeros(c.state_heads))
        self.skip = nn.Parameter(torch.ones(c.state_heads))
        self.scale = nn.Parameter(torch.ones(values))
        if self.decay is not None:
            nn.init.normal_(self.decay.weight, 0, 0.02)
            nn.init.zeros_(self.decay.bias)

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        q, k, v, z = together(x, self.q, self.k, self.v, self.z)
        if self.conv is not None:
            sizes = (q.shape[-1], k.shape[-1], v.shape[-1])
            q, k, v = F.silu(self.conv(torch.cat([q, k, v], dim=-1))).split(sizes, dim=-1)
        groups = 1 if c.shared_keys else c.state_heads
        q, k = (t.unflatten(-1, (groups, c.key_width)) for t in (q, k))
        v = v.unflatten(-1, (c.state_heads, c.value_width))
        if c.key_activation:
            q, k = rms(q), rms(k)
        if c.modal:
            return self.finish(x, z, self.modes(q, k, v) + self.skip[:, None] * v)
        if c.state_rope:
            q, k = rotate(q, c.state_rope), rotate(k, c.state_rope)
        delta = self.dt_bias if self.decay is None else self.decay(x).float() + self.dt_bias
        delta = F.softplus(delta).expand(*x.shape[:2], c.state_heads)
        log_decay = -torch.exp(self.log_a) * delta  # [B, L, h]
        y = scan(q / math.sqrt(c.key_width), k, v, log_decay, delta, c.chunk)
        return self.finish(x, z, y + self.skip[:, None] * v)

    def modes(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rate = torch.exp(self.log_rate).clamp(max=1.0)
        rate = torch.cat([rate, rate], dim=-1)  # [h, dk]
        if self.c.modal == "complex":
            frequency = torch.exp(self.log_frequency)
            q, k = turn(q, frequency), turn(k, frequency)
        k = k * torch.sqrt(-torch.expm1(-2 * rate))
        return scan_modes(q / math.sqrt(self.c.key_width), k, v, rate, self.c.chunk)

    def finish(self, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        y = rms(y).flatten(2) * self.scale
        return self.out((y * F.silu(z)).to(x.dtype))


def scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, delta: Tensor, chunk: int) -> Tensor:
    """y_t = Σ_{s≤t} (Π_{r=s+1..t} a_r) Δ_s (q_t·k_s) v_s; q, k [B, L, g, dk], v [B, L, h, dv], the rest [B, L, h]."""
    length, heads = v.shape[1:3]
    pad = -length % chunk
    if pad:
        q, k, v = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (q, k, v))
        log_decay, delta = (F.pad(t, (0, 0, 0, pad)) for t in (log_decay, delta))
    shared = q.shape[2] == 1
    q, k, v = (t.unflatten(1, (-1, chunk)).transpose(2, 3) for t in (q, k, v))  # [B, n, g, C, d]
    total = log_decay.unflatten(1, (-1, chunk)).cumsum(2).transpose(2, 3)  # [B, n, h, C] float32
    delta = delta.unflatten(1, (-1, chunk)).transpose(2, 3)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    weight = torch.exp((total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf))
    scores = (q @ k.transpose(-1, -2)) * weight * delta[..., None, :]
    y = scores.to(v.dtype) @ v
    last = total[..., -1:]
    k_in = (k * (torch.exp(last - total) * delta)[..., None]).to(v.dtype)
    added = (k_in.transpose(-1, -2) @ v).to(total.dtype)  # [B, n, h, dk, dv]
    n = added.shape[1]
    ends = last.squeeze(-1).transpose(1, 2).cumsum(-1)  # [B, h, n]: log decay up to each chunk's end
    before = F.pad(ends, (1, 0))[..., :-1]
    past = torch.ones(n, n, dtype=torch.bool, device=q.device).tril(-1)
    carry = torch.exp((before[..., :, None] - ends[..., None, :]).masked_fill(~past, -torch.inf))  # [B, h, n, n]
    states = (carry @ added.permute(0, 2, 1, 3, 4).flatten(3)).unflatten(3, added.shape[3:]).transpose(1, 2)
    q_out = (q * torch.exp(total)[..., None]).to(v.dtype)
    if shared:
        q_out = q_out.expand(-1, -1, heads, -1, -1)
    y = y + q_out @ states.to(v.dtype)
    return y.transpose(2, 3).flatten(1, 2)[:, :length]


def turn(x: Tensor, frequency: Tensor) -> Tensor:
    """[B, L, h, d] turned by position × frequency [h, d/2]."""
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def scan_modes(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, chunk: int) -> Tensor:
    """y_t = Σ_{s≤t} Σ_d q_td e^{−rate_d (t−s)} k_sd v_s: a decay [h, dk] per key channel, the same for all tokens."""
    length = v.shape[1]
    pad = -length % chunk
    q, k, v = (F.pad(t, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, chunk)).transpose(2, 3) for t in (q, k, v))
    i = torch.arange(chunk, device=q.device, dtype=torch.float32)[:, None]
    r = rate.unsqueeze(1)  # [h, 1, dk]
    low = v.dtype
    scores = (q * torch.exp(-r * (i - chunk / 2))).to(low) @ (k * torch.exp(r * (i - chunk / 2))).to(low).mT
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    y = scores.masked_fill(~causal, 0) @ v
    added = (k * torch.exp(-r * (chunk - 1 - i))).to(low).mT @ v  # [B, n, h, dk, dv]
    n = added.shape[1]
    j = torch.arange(n, device=q.device, dtype=torch.float32)
    gap = j[:, None] - 1 - j
    carry = torch.exp(-rate[..., None, None] * chunk * gap.clamp(min=0)) * (gap >= 0)  # [h, dk, n, n]
    states = torch.einsum("hdnm,bmhde->bnhde", carry.to(low), added)
    y = y + (q * torch.exp(-r * (i + 1))).to(low) @ states
    return y.transpose(2, 3).flatten(1, 2)[:, :length]


class Layer(nn.Module):
    def __init__(self, kind: str, c: Candidate) -> None:
        super().__init__()
        self.norm, self.ff_norm = Norm(c.width), Norm(c.width)
        self.mixer = {"A": Attention, "S": Selective}[kind](c)
        hidden = c.hidden if kind == "A" else c.state_hidden
        self.up, self.gate, self.down = linear(c.width, hidden), linear(c.width, hidden), linear(hidden, c.width)
        if c.zero_output:
            nn.init.zeros_(self.mixer.out.weight)
            nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        up, gate = together(self.ff_norm(x), self.up, self.gate)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, c: Candidate) -> None:
        super().__init__()
        self.c = c
        self.embedding = nn.Embedding(c.vocab, c.width)
        nn.init.normal_(self.embedding.weight, 0, 0.02)
        self.layers = nn.ModuleList(Layer(kind, c) for kind in c.pattern)
        self.norm = Norm(c.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)
