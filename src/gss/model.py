"""The language model: embedding → the layers that the config names → norm → the embedding again as the head.

One class for every family. It handles tokens, positions and states; the rest is up to the layers.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gss.choices import LAYERS, load
from gss.config import ModelConfig
from gss.nn.context import Context, Stretch
from gss.nn.dense import norm
from gss.nn.documents import Documents
from gss.nn.quantized import project
from gss.nn.state import FirstState, ModelState, SequenceLayer
from gss.ops.positions import sinusoids


class LanguageModel(nn.Module):
    """Next-token logits for batches of token sequences, whole or in pieces.

    >>> model = gss.build_model(gss.preset("gss-tiny"))
    >>> logits, state = model(tokens)                # [B, L] → [B, L, V]
    >>> logits, state = model(tokens, state)         # continues where the first piece ended
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)  # N(0, 1), tied to the head
        with torch.no_grad():
            self.embedding.weight.mul_(config.embedding_std)
        self.layers = nn.ModuleList(build_layer(kind, config) for kind in config.layers)
        self.norm = norm(config.width, config)
        self.first: FirstState | None = None

    def start_from(self, state: ModelState | None) -> None:
        """Start every sequence from a copy of this state (of one sequence), as if the model had read its text.

        None restores the default, the empty state.
        """
        if state is not None:
            self.check_state(state, 1)
            state = state.to(self.embedding.weight.device)
        self.first = None if state is None else FirstState(state)

    def forward(
        self, tokens: Tensor, state: ModelState | None = None, keep_state: bool = True
    ) -> tuple[Tensor, ModelState | None]:
        """Logits [B, L, V] for tokens [B, L], and the state after them.

        `state` comes from an earlier call (None: the start of a sequence). With `keep_state` off, no state is computed,
        which is faster when training on independent sequences, and None is returned in its place.
        """
        self.check_tokens(tokens, wait=False)
        hidden, state = self.hidden(tokens, state, keep_state)
        return self.logits(hidden), state

    def hidden(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        keep_state: bool = True,
        starts: Tensor | None = None,
        context: Context | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        """The normalized activations [B, L, E] before the head; apply `logits` to any part of them.

        `starts` [B, L] marks the first token of every document in packed rows. Each document is then read on its own,
        and no state comes in or goes out. With a `context`, all its ranks pass the same tokens and state. Each gets the
        activations of its own stretch of the tokens, and all get the same state after the last token.
        """
        if state is not None:
            self.check_state(state, tokens.shape[0])
        elif self.first is not None and starts is None:
            state = self.first(tokens.shape[0])
        first = tokens.new_zeros(tokens.shape[0], dtype=torch.int64) if state is None else state.position
        position = first.unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
        documents: Any = None  # in place of every layer's state
        if starts is not None:
            if state is not None or keep_state:
                raise ValueError("packed rows carry no state: pass `starts` without a state, and keep_state=False")
            if self.first is not None:
                raise ValueError("packed rows start from empty states, but this model has its own")
            documents = Documents(starts, context.rank, context.size) if context else Documents(starts)
            position = documents.position
        elif context is not None:
            position = context.own(position)
        x = self.embed(tokens if context is None else context.own(tokens), position)
        after = []
        for i, layer in enumerate(self.layers):
            before = documents if state is None else state.layers[i]
            if context is not None:
                before = Stretch(context, position, state and state.layers[i], documents)
            x, layer_state = layer(x, before, keep_state)
            after.append(layer_state)
        return self.norm(x), ModelState(first + tokens.shape[1], tuple(after)) if keep_state else None

    def embed(self, tokens: Tensor, position: Tensor) -> Tensor:
        """The input of the first layer: [B, L, E] for tokens at positions, both [B, L]."""
        x = self.embedding(tokens)
        if self.config.positions == "sinusoidal":
            x = x + sinusoids(position, self.config.width).to(x.dtype)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head: [..., E] → [..., V]."""
        return project(hidden * self.head_scale, self.embedding)

    @property
    def head_scale(self) -> float:
        """The factor by which the head multiplies activations before the product with the embedding."""
        return self.config.width**-0.5 if self.config.head_scale is None else self.config.head_scale

    def initial_state(self, batch: int) -> ModelState:
        """The state before any token, for `batch` sequences."""
        if batch < 1:
            raise ValueError(f"a batch needs at least 1 sequence, not {batch}")
        if self.first is not None:
            return self.first(batch)
        position = torch.zeros(batch, dtype=torch.int64, device=self.device)
        return ModelState(position, tuple(layer.initial_state(batch) for layer in self.sequence_layers()))

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.norm.weight.device

    @property
    def bounded_state(self) -> bool:
        """Whether the state has the same size at any length (false for attention over everything)."""
        slots = [slot for layer in self.sequence_layers() for slot in layer.state_slots().values()]
        return all(size is not None for slot in slots for size in slot.shape)

    def check_state(self, state: ModelState, batch: int) -> None:
        """Raise ValueError for a state of another model or of another number of sequences."""
        if not isinstance(state, ModelState):
            raise ValueError(f"the state must be a ModelState (what a call of the model returned), not {type(state)}")
        if state.batch != batch:
            raise ValueError(f"the state has {state.batch} sequences, the input {batch}: select or join its rows")
        if len(state.layers) != len(self.layers):
            raise ValueError(f"the state is another model's: it has {len(state.layers)} layers, not {len(self.layers)}")
        for layer, layer_state in zip(self.sequence_layers(), state.layers, strict=True):
            layer.check_state(layer_state, batch)

    def sequence_layers(self) -> list[SequenceLayer]:
        """The layers, with their type."""
        return [layer for layer in self.layers if isinstance(layer, SequenceLayer)]

    def check_tokens(self, tokens: Tensor, wait: bool = True) -> None:
        """Raise ValueError for anything but [batch, length] ids of the vocabulary.

        Ids on a GPU are checked only with `wait`, because this waits for the GPU: use it where text enters. Otherwise
        the embedding checks them, by an assertion on the device.
        """
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens must be int64 or int32 ids, not {tokens.dtype}")
        if tokens.ndim != 2:
            raise ValueError(f"tokens must have the shape [batch, length], not {list(tokens.shape)}")
        if tokens.numel() == 0:
            raise ValueError(f"tokens are empty (shape {list(tokens.shape)}): give at least one sequence and one token")
        if not wait and tokens.device.type != "cpu":
            return
        least, most = (int(bound) for bound in tokens.aminmax())
        if least < 0 or most >= self.config.vocab_size:
            wrong = least if least < 0 else most
            raise ValueError(
                f"token id {wrong} is outside the vocabulary of {self.config.vocab_size}: "
                "is the tokenizer the one this model was built for?"
            )


def build_layer(kind: str, config: ModelConfig) -> SequenceLayer:
    """A layer of a kind that `gss.choices.LAYERS` lists."""
    layer: SequenceLayer = load(LAYERS[kind])(config)
    return layer


def build_model(config: ModelConfig, seed: int | None = None) -> LanguageModel:
    """A newly initialized model of any family, in float32 on the default device.

    With a seed it is the model that training with that seed starts from, and torch's random state is not changed.

    >>> model = gss.build_model(gss.preset("gss-tiny"), seed=0)
    >>> model.bounded_state
    True
    """
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        return LanguageModel(config)


class NothingDrawn(TorchFunctionMode):
    """Skip random initialization: seconds for a large model, and on the meta device torch would import its compiler.

    The draws' scaling too, the first to touch their memory.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "").endswith(("normal_", "uniform_", "mul_")):
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))
