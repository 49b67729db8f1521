"""One sequence on several ranks: each rank has a stretch of it, and only states pass between them.

By the contract of layers, a sequence gives the same result whole and in pieces with the state carried. Here the pieces
are stretches on different ranks, read at the same time. Operations on single tokens run on a rank's own stretch; a
mixer first needs the state before its stretch. How it gets that state depends on what the mixer remembers:

    by_decay     The state after a stretch is the state before it, decayed, plus what the stretch alone adds. Every rank
                 computes what its own stretch adds; after one all-gather, each sums up what lies before its own.
    by_recent    The state holds only the last few tokens: a rank gets it from the rank before it.
    in_turn      Anything else: a rank waits for the state of the rank before it, and passes on its own.

Gradients go back the same way. States before and after a sequence are the same on all ranks, so pieces, lanes and
prefill work as on one rank. Each rank has its part of the gradients; their sum over ranks is the whole.

Layers need no code for this: as with `Documents`, the model passes them a `Stretch` in place of a state, and
`across_ranks` around the mixer handles it.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gss.nn.documents import Documents
from gss.nn.state import Outputs, SequenceLayer
from gss.ops import fast

Mixer = Callable[..., Any]


class Context:
    """The ranks that share sequences, in order, and this one among them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def own(self, x: Tensor) -> Tensor:
        """This rank's stretch [B, L, …] of rows [B, ranks · L, …]."""
        if x.shape[1] % self.size:
            raise ValueError(f"{x.shape[1]} tokens cannot be divided among {self.size} ranks")
        return x.unflatten(1, (self.size, -1))[:, self.rank]

    def whole(self, x: Tensor) -> Tensor:
        """The inverse of `own`, on every rank, without gradients."""
        return self.gather(x).transpose(0, 1).flatten(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's tensor, [ranks, …], without gradients."""
        gathered = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(gathered), x.contiguous(), group=self.group)
        return gathered

    def send(self, tensors: tuple[Tensor, ...], rank: int) -> None:
        for tensor in tensors:
            dist.send(tensor.contiguous(), group=self.group, group_dst=rank)

    def receive(self, like: tuple[Tensor, ...], rank: int) -> tuple[Tensor, ...]:
        """Receive tensors of known shapes from another rank."""
        received = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in like)
        for tensor in received:
            dist.recv(tensor, group=self.group, group_src=rank)
        return received


def shared_pieces(tokens: int, piece: int, context: Context | None) -> Iterator[tuple[int, int, Context | None]]:
    """The first token, length and ranks of each piece of a sequence. Ranks share pieces of `size · piece` tokens; what
    is left at the end, where a stretch could be shorter than a layer's reach, every rank reads by itself.
    """
    at = 0
    while at < tokens:
        sharing = context if context and tokens - at >= context.size * piece else None
        length = min(context.size * piece if context and sharing else piece, tokens - at)
        yield at, length, sharing
        at += length


@dataclass(frozen=True)
class Stretch:
    """A rank's part of some sequences, in place of a layer's state; `state` is the one before all of a sequence."""

    context: Context
    position: Tensor
    """[B, L], the position of each token in its document."""
    state: Any = None
    documents: Documents | None = None

    def __getitem__(self, name: str) -> "Stretch":
        """In place of the tensor of that name in a layer's state."""
        return replace(self, state=self.state and self.state[name])

    def run(self, mixer: Mixer, x: Tensor, before: Any) -> Tensor:
        """The mixer's outputs for the stretch after the state before it."""
        if self.documents is not None:
            return self.documents.mix(lambda rows, state: mixer(rows, state, False)[0], x, before)
        y: Tensor = mixer(x, before, False)[0]
        return y

    def last_document(self, x: Tensor) -> Tensor:
        """The stretch with zeros before each row's last document, which alone contributes to the state after it."""
        return x if self.documents is None else self.documents.last(x)


# Each of the following also returns its first tensor unchanged. The backward pass therefore reaches it on every rank,
# even on one that does not use what it received: otherwise the others would wait forever.


class _Gather(torch.autograd.Function):
    """Tensors of every rank, [ranks, …] each."""

    @staticmethod
    def forward(ctx: Any, context: Context, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.context = context
        return x.view_as(x), *(context.gather(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, x: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        own = []
        for gradient in gradients:
            own.append(torch.empty_like(gradient[0], memory_format=torch.contiguous_format))
            dist.reduce_scatter(own[-1], list(gradient.contiguous()), group=ctx.context.group)
        return None, x, *own


class _Receive(torch.autograd.Function):
    """Tensors from the previous rank, of the shapes of `like`."""

    @staticmethod
    def forward(ctx: Any, context: Context, x: Tensor, *like: Tensor) -> tuple[Tensor, ...]:
        ctx.context = context
        return x.view_as(x), *context.receive(like, context.rank - 1)

    @staticmethod
    def backward(ctx: Any, x: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.context.send(gradients, ctx.context.rank - 1)
        return None, x, *(None for _ in gradients)


class _Send(torch.autograd.Function):
    """Tensors for the next rank."""

    @staticmethod
    def forward(ctx: Any, context: Context, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.context = context
        ctx.like = tuple(tensor.new_empty(()).expand(tensor.shape) for tensor in tensors)
        context.send(tensors, context.rank + 1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor | None, ...]:
        return None, x, *ctx.context.receive(ctx.like, ctx.context.rank + 1)


def by_decay(space: Any, mixer: Mixer, x: Tensor, stretch: Stretch, keep_state: bool) -> tuple[Tensor, Tensor | None]:
    """For states that add up. `space` has `left(x)`, the state after tokens alone, and `faded(state, tokens)`."""
    context, length = stretch.context, x.shape[1]
    left = space.left(stretch.last_document(x))
    x, gathered = _Gather.apply(context, x, left)
    before = state = torch.zeros_like(left) if stretch.state is None else stretch.state
    for rank in range(context.size if keep_state else context.rank):
        state = space.faded(state, length)
        if stretch.documents is not None:
            state = stretch.documents.survivors(rank, state)
        state = state + gathered[rank]
        if rank == context.rank - 1:
            before = state
    return stretch.run(mixer, x, before), state if keep_state else None


def by_recent(layer: Any, mixer: Mixer, x: Tensor, stretch: Stretch, keep_state: bool) -> Outputs:
    """For states that hold recent tokens, at most `layer.reach` of them."""
    context, length, reach = stretch.context, x.shape[1], layer.reach
    if reach is None:
        raise ValueError(
            "attention over everything keeps every token, so ranks cannot share a sequence by passing states: set "
            "attention.chunk or attention.sliding, or parallel.context=1"
        )
    if length < reach:
        raise ValueError(
            f"each of {context.size} ranks gets {length} tokens of a sequence, fewer than the {reach} that a layer "
            "keeps: use longer sequences or pieces, or fewer ranks"
        )
    blank = None
    if isinstance(layer, SequenceLayer):
        blank = {**layer.initial_state(len(x)), "length": stretch.position[:, -1] + 1 - reach}
    _, left = mixer(stretch.last_document(x)[:, length - reach :], blank, True)
    left.pop("length", None)
    x, *gathered = _Gather.apply(context, x, *left.values())
    given = {name: tensors.unbind() for name, tensors in zip(left, gathered, strict=True)}
    before = stretch.state
    if context.rank:
        before = {name: tensors[context.rank - 1] for name, tensors in given.items()}
        before["length"] = stretch.position[:, 0]
    y = stretch.run(mixer, x, before)
    if not keep_state:
        return y, {}
    after = {name: tensors[-1] for name, tensors in given.items()}
    return y, {**after, "length": stretch.position[:, 0] + (context.size - context.rank) * length}


def in_turn(layer: SequenceLayer, mixer: Mixer, x: Tensor, stretch: Stretch, keep_state: bool) -> Outputs:
    """For any other state: one rank after another."""
    context, state = stretch.context, stretch.state
    if stretch.documents is not None:
        raise ValueError("ranks cannot share packed rows in a block-recurrent model: set parallel.context=1")
    names = [name for name in layer.state_slots() if name != "length"]
    if context.rank:
        blank = layer.initial_state(len(x))
        x, *received = _Receive.apply(context, x, *(blank[name] for name in names))
        state = {**dict(zip(names, received, strict=True)), "length": stretch.position[:, 0]}
    y, after = mixer(x, state, True)
    left = [after[name] for name in names]
    if context.rank < context.size - 1:
        y = _Send.apply(context, y, *left)
    if not keep_state:
        return y, {}
    y, *gathered = _Gather.apply(context, y, *left)
    last = {name: tensors[-1] for name, tensors in zip(names, gathered, strict=True)}
    return y, {**last, "length": after["length"] + (context.size - 1 - context.rank) * x.shape[1]}


def across_ranks(way: Callable[..., Any]) -> Callable[[Mixer], Mixer]:
    """Decorates a mixer as in `each_document_alone`: given a `Stretch` as the state, it finds the state before the
    stretch in one of the ways above.
    """

    def decorate(mixer: Mixer) -> Mixer:
        @fast.uncompiled  # exchanges between ranks are not the compiler's
        def exchange(self: Any, x: Tensor, stretch: Stretch, keep_state: bool) -> Any:
            return way(self, functools.partial(mixer, self), x, stretch, keep_state)

        @functools.wraps(mixer)
        def mix(self: Any, x: Tensor, state: Any = None, keep_state: bool = True) -> Any:
            if isinstance(state, Stretch):
                return exchange(self, x, state, keep_state)
            return mixer(self, x, state, keep_state)

        return mix

    return decorate
