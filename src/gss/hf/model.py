"""`GSSForCausalLM`: a `LanguageModel` of any family behind the interface of `transformers`, and its cache.

It translates inputs, outputs and caches. Arithmetic, parameter names (below `model.`) and initialization are those of
the language model, which has no attention mask: in a padded batch, each row's real tokens are read as if on their own.
Independent of run folders and vocabularies.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from gss.config import override
from gss.hf.config import GSSConfig
from gss.loss import next_token_loss
from gss.model import LanguageModel, build_model
from gss.nn.state import ModelState

_IGNORED = -100  # the label that counts for nothing, by convention


class StateCache(Cache):
    """A `ModelState` that follows a batch through `generate`: the mutable container that this expects.

    States are values, so branching costs nothing: read a document once, then generate from `copy.deepcopy(cache)` for
    each question.
    """

    is_croppable = False  # see `crop`

    def __init__(self, state: ModelState | None = None, columns: int = 0) -> None:
        super().__init__(layers=[])
        self.state = state
        self.columns = columns  # of input read so far, padding included, as in the length of an attention mask

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.batch_size} sequences, {self.columns} columns)"

    def __deepcopy__(self, memo: dict[int, Any]) -> "StateCache":
        return StateCache(self.state, self.columns)  # states are immutable, so two caches can share one

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no maximum."""
        return -1

    def reset(self) -> None:
        self.state, self.columns = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each row continue from the row that its beam came from."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.state.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a recurrent state cannot be rewound."""
        raise ValueError("a recurrent state cannot be rewound: keep a copy.deepcopy of the cache from before")

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before anything was read."""
        return -1 if self.state is None else self.state.batch

    @property
    def is_initialized(self) -> bool:
        return self.state is not None


class GSSForCausalLM(PreTrainedModel, GenerationMixin):
    """Next-token logits, loss and `generate`. Head and embedding are one parameter, so nothing is tied by name."""

    config_class = GSSConfig
    base_model_prefix = "model"
    _is_stateful = True  # the state cannot be rewound, so there is no assisted generation
    # The embedding is also the head, so the model stays on one device.
    _no_split_modules = ["LanguageModel"]  # noqa: RUF012  as the base class declares it
    # Also when loaded in half precision.
    _keep_in_fp32_modules_strict = ["state_space"]  # noqa: RUF012

    def __init__(self, config: GSSConfig, model: LanguageModel | None = None) -> None:
        super().__init__(config)
        self.model = build_model(config.model_config()) if model is None else model
        if self.model.embedding.weight.device.type == "meta":  # inside from_pretrained, which fills in the weights
            self._keep_derived()
        else:
            for module in self.modules():
                module._is_hf_initialized = True  # type: ignore[assignment]  # our own first weights stay
        self.post_init()

    @classmethod
    def of(cls, model: LanguageModel, *, eos_token_id: int | None = None) -> "GSSForCausalLM":
        """Wrap one of our models; the weights are shared, not copied."""
        return cls(GSSConfig.of(model.config, eos_token_id=eos_token_id), model).train(model.training)

    def _keep_derived(self) -> None:
        """Compute the buffers that follow from the configuration and are not stored, for `_init_weights` to fill in."""
        if not any(module._non_persistent_buffers_set for module in self.model.modules()):
            return
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            whole = build_model(self.model.config)
        for module, filled in zip(self.model.modules(), whole.modules(), strict=True):
            names = filled._non_persistent_buffers_set
            module.derived_buffers = {name: filled.get_buffer(name) for name in names}

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding, which is also the head."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding by one with any number of ids."""
        assert isinstance(value, nn.Embedding)
        self.model.embedding = value
        self.model.config = override(self.model.config, {"vocab_size": value.num_embeddings})
        self.config.vocab_size = value.num_embeddings

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize what a folder lacks, and the new rows of a larger vocabulary."""
        for name, value in module.__dict__.pop("derived_buffers", {}).items():
            module.get_buffer(name).copy_(value)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.model.config.embedding_std)
        elif any(not getattr(p, "_is_hf_initialized", False) for p in module.parameters(recurse=False)):
            name = type(module).__name__
            raise ValueError(f"there are no weights for a {name}: the file is incomplete, or of another config's model")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits [B, L, V] for tokens [B, L], the loss of `labels` and the cache after them.

        attention_mask     [B, L], or with a cache [B, columns + L]: 0 at padding, on either side of a row's tokens
        past_key_values    the cache that an earlier call returned; it is updated in place
        labels             the tokens themselves (they are shifted here), -100 where they do not count
        logits_to_keep     return the logits of this many last positions, or of the given ones; 0: all
        """
        _refuse(inputs_embeds=inputs_embeds, **kwargs)
        if input_ids is None:
            raise ValueError("there are no input_ids: give token ids [batch, length]")
        if past_key_values is not None and not isinstance(past_key_values, StateCache):
            kind = type(past_key_values).__name__
            raise ValueError(f"past_key_values is a {kind}: give the gss.hf.StateCache that the model returned")
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training and labels is None)
        state = None if past_key_values is None else past_key_values.state
        if state is None or input_ids.shape[-1] > 1:  # tokens of a step were chosen from the vocabulary
            self.model.check_tokens(input_ids)
        if attention_mask is None:
            hidden, state = self.model.hidden(input_ids, state, use_cache)
        else:
            (batch, length), given = input_ids.shape, attention_mask.shape
            if len(given) != 2 or given[0] != batch or given[1] < length:
                raise ValueError(f"attention_mask must be [batch, length] like input_ids, not {list(given)}")
            # Its last columns belong to these tokens.
            hidden, state = read_padded(self.model, input_ids, attention_mask[:, -length:], state, use_cache)
        cache = None
        if use_cache:
            cache = StateCache() if past_key_values is None else past_key_values
            cache.state, cache.columns = state, cache.columns + input_ids.shape[1]
        loss, logits = None, None
        if labels is not None and self.training and self.config.loss_without_logits:
            # The same loss without holding all logits at once, over the labels of the whole batch.
            targets = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
            counted, items = targets != _IGNORED, kwargs.get("num_items_in_batch")
            total = next_token_loss(self.model.logits, self.model.embedding.weight, hidden, targets, counted)
            loss = total / (counted.sum() if items is None else items)
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.model.logits(hidden[:, kept])
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)  # type: ignore[arg-type]
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        _refuse(inputs_embeds=inputs_embeds)
        if is_first_iteration and attention_mask is not None and bool((attention_mask[:, -1] == 0).any()):
            raise ValueError("a prompt ends in padding: pad on the left (tokenizer.padding_side = 'left')")
        if next_sequence_length is not None:
            input_ids = input_ids[:, -next_sequence_length:]
        if not is_first_iteration and next_sequence_length == 1:
            attention_mask = None  # generated tokens are never padding
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": past_key_values}
        # Inputs may be on another device than the model.
        inputs = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        return {**inputs, **kwargs}

    def _prepare_cache_for_generation(  # type: ignore[override]  # the rest is for caches of keys and values
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError("cache_implementation is for keys and values: leave it out, the state is recurrent")
        cache = model_kwargs.get("past_key_values")
        if cache is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = StateCache()


def _refuse(**kwargs: Any) -> None:
    """Refuse arguments that would change the result and are not supported."""
    reasons = {
        "inputs_embeds": "the models read token ids only: give input_ids",
        "position_ids": "positions follow from the tokens read: leave it out, and give each document its own row",
        "output_attentions": "not every layer has attention weights",
        "output_hidden_states": "the activations between layers are not returned: use a forward hook on model.layers",
    }
    for name, reason in reasons.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"{name} is not supported: {reason}")


def read_padded(
    model: LanguageModel, tokens: Tensor, mask: Tensor, state: ModelState | None, keep_state: bool
) -> tuple[Tensor, ModelState | None]:
    """The activations [B, L, E] of real tokens in place (those of padding mean nothing), and the state after them."""
    real, column = mask != 0, torch.arange(mask.shape[1], device=mask.device)
    first, count = real.long().argmax(1, keepdim=True), real.sum(1, keepdim=True)
    if not torch.equal(real, (column >= first) & (column < first + count)):
        raise ValueError("the attention mask has holes: padding may only come before or after all real tokens of a row")
    if state is None and not keep_state:
        # Shifted to the left, rows are read together: models are causal, and padding after a row's end has no effect.
        to_left, back = ((column + way * first) % len(column) for way in (1, -1))
        hidden, _ = model.hidden(tokens.gather(1, to_left), keep_state=False)
        return hidden.gather(1, back.unsqueeze(-1).expand_as(hidden)), None
    if bool(real.all()):
        return model.hidden(tokens, state, keep_state)
    # A state must end at the row's last real token: rows of the same extent are read together, and their states joined.
    groups: dict[tuple[int, int], list[int]] = {}
    for row, extent in enumerate(zip(first[:, 0].tolist(), count[:, 0].tolist(), strict=True)):
        groups.setdefault(extent, []).append(row)
    before = model.initial_state(tokens.shape[0]) if state is None else state
    parts, states, order = [], [], []
    for (start, size), rows in groups.items():
        after = before.select(rows)
        if size:
            # Without a state the rows are read in parallel, without the cost of carrying one.
            hidden, read = model.hidden(tokens[rows, start : start + size], None if state is None else after)
            assert read is not None
            after = read
        else:  # nothing of these rows in this piece
            hidden = model.embedding.weight.new_zeros(len(rows), 0, model.config.width)
        parts.append(F.pad(hidden, (0, 0, start, tokens.shape[1] - start - size)))
        states.append(after)
        order += rows
    back = torch.argsort(torch.tensor(order, device=tokens.device))
    return torch.cat(parts)[back], ModelState.join(states).select(back)
