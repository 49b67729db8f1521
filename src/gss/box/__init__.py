"""The model that comes with the package: a small GSS-Hybrid on books, used where no run is named.

`folder` says where it is; it is a run folder like any other, with weights in bf16 and a card (docs/box.md says how it
is made). Imports no torch.
"""

from pathlib import Path

NAME = "box"
"""What the model is called where a run would be called by its folder."""
SHIPPED = Path(__file__).parent / "model"


def folder() -> Path:
    """The folder of the model that comes with this build; ValueError where none does."""
    if not (SHIPPED / "config.json").is_file():
        raise ValueError(
            "no run is named, and this build comes without a model of its own: name a run folder (`gss train` makes "
            f"one), or make a model for the box and put its folder at {SHIPPED} (docs/box.md)"
        )
    return SHIPPED
