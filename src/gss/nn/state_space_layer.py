"""Layers whose tokens mix in state spaces alone: what GSS and DSS have in common.

Such a layer says which state spaces it has and what it computes around them; running it in parallel, carrying its
state and stepping it follow from that.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from gss.nn.documents import Documents
from gss.nn.state import LayerState, SequenceLayer, Slot
from gss.nn.state_space import DiagonalStateSpace
from gss.nn.stepping import StateSpaceStepper, Stepper

Mix = Callable[[Tensor], Tensor]
"""[B, L, H] → [B, L, H], in the state's precision."""


class StateSpaceLayer(SequenceLayer):
    """A sequence layer made of `spaces` and of what `around` does with them."""

    def spaces(self) -> dict[str, DiagonalStateSpace]:
        """The state spaces by the names of their states, in the order of use."""
        raise NotImplementedError

    def around(self, x: Tensor, mixes: Sequence[Mix]) -> Tensor:
        """The layer's output, each state space replaced by the function in its place."""
        raise NotImplementedError

    def state_slots(self) -> dict[str, Slot]:
        return {name: Slot((space.channels, space.config.modes, 2)) for name, space in self.spaces().items()}

    def mixing_flops(self, length: int) -> float:
        return sum(space.mixing_flops(length) for space in self.spaces().values())

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        keep_state: bool = True,
        documents: Documents | None = None,
    ) -> tuple[Tensor, LayerState]:
        after: LayerState = {}

        def mix(name: str, space: DiagonalStateSpace) -> Mix:
            def run(u: Tensor) -> Tensor:
                y, modes = space(u, state and state[name], keep_state, documents)
                if modes is not None:
                    after[name] = modes
                return y

            return run

        return self.around(x, [mix(name, space) for name, space in self.spaces().items()]), after

    def stepper(self, state: LayerState, block: int) -> Stepper:
        return _Steps(self, state, block)


class _Steps:
    def __init__(self, layer: StateSpaceLayer, state: LayerState, block: int) -> None:
        self._layer = layer
        self._spaces = {name: StateSpaceStepper(space, state[name], block) for name, space in layer.spaces().items()}
        self._mixes = [space.step for space in self._spaces.values()]

    def step(self, x: Tensor) -> Tensor:
        return self._layer.around(x, self._mixes)

    def state(self) -> LayerState:
        return {name: space.modes() for name, space in self._spaces.items()}

    def join(self, state: LayerState) -> None:
        for name, space in self._spaces.items():
            space.join(state[name])

    def keep(self, rows: Sequence[int]) -> None:
        for space in self._spaces.values():
            space.keep(rows)
