"""The bundled model: a small one trained on books, used if no run is named.

`folder` returns its location. It is an ordinary run folder, with a model card; docs/box.md says how it is made. Imports
no torch.
"""

from pathlib import Path

NAME = "box"
"""What the model is called where a run would be called by its folder."""
SHIPPED = Path(__file__).parent / "model"


def folder() -> Path:
    """The folder of the bundled model; ValueError if this build has none."""
    if not (SHIPPED / "config.json").is_file():
        raise ValueError(
            "no run given, and this build has no bundled model: name a run folder (`gss train` makes one), or make a "
            f"bundled model and put its folder at {SHIPPED} (docs/box.md)"
        )
    return SHIPPED
