"""The configuration class for `transformers`: a `ModelConfig` as plain data, and the ids of special tokens.

Everything about the model is in `ModelConfig`. Every family is the same class with another mapping, and a field added
there needs no change here.
"""

from typing import Any

from transformers import PreTrainedConfig

from gss.config import ModelConfig, from_mapping, override, to_mapping


class GSSConfig(PreTrainedConfig):
    """A model of any family.

    >>> GSSConfig.of(gss.preset("gss-hybrid-tiny"), eos_token_id=256)
    """

    model_type = "gss"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  the trainer adds it to a list

    model: dict[str, Any] | None = None  # the fields of `gss.ModelConfig` by name; missing ones have their defaults
    bos_token_id: int | None = None  # first input of every document: the end-of-document id, as in training
    eos_token_id: int | list[int] | None = None  # ends a document, and a generation
    pad_token_id: int | None = None  # pads short rows; ignored where the attention mask is 0
    use_cache: bool = True  # whether a forward pass outside training returns the state after it
    # In training, compute the loss from a few rows of logits at a time and return no logits, which saves most of the
    # memory with a large vocabulary. Off by default, since some callers read the logits.
    loss_without_logits: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        # Complete and in order, so that a saved config describes the whole model.
        self.model = to_mapping(from_mapping(ModelConfig, self.model or {}))
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, config: ModelConfig, *, eos_token_id: int | None = None, **fields: Any) -> "GSSConfig":
        """The configuration of one of our models; one id begins and ends documents and serves as padding."""
        ids = {"bos_token_id": eos_token_id, "eos_token_id": eos_token_id, "pad_token_id": eos_token_id}
        return cls(model=to_mapping(config), **{**ids, **fields})

    def model_config(self) -> ModelConfig:
        """The configuration as a `ModelConfig`."""
        return from_mapping(ModelConfig, self.model or {})

    @property
    def vocab_size(self) -> int:
        return self.model_config().vocab_size

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.model = to_mapping(override(self.model_config(), {"vocab_size": size}))

    @property
    def hidden_size(self) -> int:
        return self.model_config().width

    @property
    def num_hidden_layers(self) -> int:
        return self.model_config().depth
