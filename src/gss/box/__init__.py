"""The model that comes with the package: a small GSS-Hybrid on books, used where no run is named.

`folder` says where it lies; it is a run folder like any other, with weights in bf16 and a card. How it is made:
`export` (from a run to such a folder) and `card` (what there is to say about it). Imports no torch.
"""

from pathlib import Path

NAME = "gss-box"
"""What the model is called where a run would be called by its folder."""
MOST_BYTES = 16_000_000
"""All files of the folder together may not be larger."""
CARD, FACTS = "card.md", "box.json"
"""The card for people, and the figures that it is made from."""

SHIPPED = Path(__file__).parent / "model"


def folder() -> Path:
    """The folder of the model that comes with this build; ValueError where none does."""
    if not (SHIPPED / "config.json").is_file():
        raise ValueError(
            "no run is named, and this build comes without a model of its own: name a run folder (`gss train` makes "
            "one), or train the model for the box with benchmarks/box_on_gpu.py and put its folder at "
            f"{SHIPPED} (docs/box.md)"
        )
    return SHIPPED
