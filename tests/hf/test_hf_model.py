"""The models in `transformers`: generation by cache, beams and padding, saving, loss and Trainer, for every family."""

import copy
from pathlib import Path

import pytest
import torch

import gss
from gss.generate import Sampling
from tests.comparing import stream
from tests.conftest import ALL_FAMILIES, FAMILIES, small_config

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("gss.hf")

EOS = 60


def build(family: str) -> "hf.GSSForCausalLM":
    config = small_config(family, **{"attention.chunk": 8} if family == "gss-hybrid" else {})
    return hf.GSSForCausalLM(hf.GSSConfig.of(config, eos_token_id=EOS)).eval()


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[EOS] * (longest - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


def prompts_of(*lengths: int) -> list[list[int]]:
    return [torch.randint(0, EOS, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_loaded_by_the_auto_classes_generates_as_gss_does(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, hf.GSSForCausalLM)
    assert transformers.AutoConfig.from_pretrained(tmp_path).model_config() == model.model.config
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for prompt in prompts_of(1, 23):
        expected = list(stream(model.model, prompt, max_tokens=25, sampling=Sampling(temperature=0), eos_id=EOS))
        produced = loaded.generate(torch.tensor([prompt]), max_new_tokens=25, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert [token for token in produced if token != EOS] == expected


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_beams_with_the_cache_are_beams_without(family: str) -> None:
    model = build(family).double()
    batch = left_padded(prompts_of(9, 4))
    options = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 12, "do_sample": False}
    with_cache = model.generate(**batch, **options)
    assert with_cache.shape[0] == 6
    assert torch.equal(with_cache, model.generate(**batch, **options, use_cache=False))
    sampled = model.generate(**batch, do_sample=True, num_return_sequences=2, max_new_tokens=5)
    assert sampled.shape == (4, 14)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_left_padding_is_each_prompt_alone(family: str) -> None:
    model = build(family)
    prompts = prompts_of(17, 1, 9, 9, 16)
    together = model.generate(**left_padded(prompts), max_new_tokens=20, do_sample=False)[:, 17:]
    in_pieces = model.generate(**left_padded(prompts), max_new_tokens=20, do_sample=False, prefill_chunk_size=5)[:, 17:]
    for prompt, row, pieces in zip(prompts, together.tolist(), in_pieces.tolist(), strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
        assert row[: len(alone)] == alone
        assert set(row[len(alone) :]) <= {EOS}
        assert pieces == row


@pytest.mark.parametrize("use_cache", [False, True])
def test_logits_stand_where_the_tokens_do(use_cache: bool) -> None:
    model = build("gss-hybrid").double()
    tokens, mask = torch.randint(0, EOS, (4, 12)), torch.ones(4, 12)
    mask[1, :5] = mask[2, 9:] = mask[3, :3] = mask[3, 10:] = 0  # whole, left, right, both
    output = model(tokens, attention_mask=mask, use_cache=use_cache)
    for row in range(4):
        real = mask[row].bool()
        alone = model(tokens[row : row + 1, real], use_cache=True)
        assert torch.allclose(output.logits[row, real], alone.logits[0], atol=1e-12)
        if use_cache:
            state = output.past_key_values.state.select([row])
            after = model.model(torch.tensor([[5]]), state)[0]
            assert torch.allclose(after, model.model(torch.tensor([[5]]), alone.past_key_values.state)[0], atol=1e-12)


def test_logits_to_keep() -> None:
    model, tokens = build("gss"), torch.randint(0, EOS, (2, 7))
    whole = model(tokens).logits
    assert torch.equal(model(tokens, logits_to_keep=2).logits, whole[:, -2:])
    assert torch.equal(model(tokens, logits_to_keep=torch.tensor([0, 3])).logits, whole[:, [0, 3]])
    assert torch.equal(model(tokens, return_dict=False)[0], whole)


def test_a_cache_is_read_once_and_branched() -> None:
    model = build("gss-hybrid")
    document, questions = prompts_of(30)[0], prompts_of(3, 5)
    cache = model(torch.tensor([document])).past_key_values
    assert cache.get_seq_length() == 30
    assert len(cache) == 2
    for question in questions:
        ids = torch.tensor([document + question])
        expected = model.generate(ids, max_new_tokens=8, do_sample=False)
        branch = copy.deepcopy(cache)
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=branch), expected)
        assert cache.get_seq_length() == 30
        assert branch.get_seq_length() > 30
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == 3
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert "2 sequences" in repr(cache)
    with pytest.raises(ValueError, match="cannot be rewound"):
        cache.crop(1)
    cache.reset()
    assert (cache.get_seq_length(), cache.is_initialized, cache.batch_size) == (0, False, -1)


def test_wrapping_shares_the_weights_and_first_weights_are_ours() -> None:
    torch.manual_seed(3)
    plain = gss.build_model(small_config("dss"))
    wrapped = hf.GSSForCausalLM.of(plain)
    assert wrapped.model is plain
    torch.manual_seed(3)
    fresh = hf.GSSForCausalLM(hf.GSSConfig.of(small_config("dss"))).state_dict()
    assert all(torch.equal(fresh[f"model.{name}"], tensor) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize("family", [*FAMILIES, "slide", "xl"])
def test_half_precision_keeps_state_spaces_in_full(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    model = hf.GSSForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "state_space" in name else torch.bfloat16)
    tokens = torch.randint(0, EOS, (2, 30))
    cache = model(tokens[:, :20]).past_key_values
    after = model(tokens[:, 20:], past_key_values=cache).logits.float()
    assert torch.nn.functional.mse_loss(after, model(tokens).logits[:, 20:].float()) < 1e-3


def test_loss_is_the_plain_one() -> None:
    model, tokens = build("gss-hybrid").double().train(), torch.randint(0, EOS, (3, 11))
    mask, labels = torch.ones(3, 11), tokens.clone()
    mask[0, 8:], labels[0, 8:] = 0, -100
    logits = model.model(tokens)[0]
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    counted = int((labels[:, 1:] != -100).sum())
    for without_logits in (False, True):
        model.config.loss_without_logits = without_logits
        output = model(tokens, attention_mask=mask, labels=labels)
        assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert (output.logits is None) == without_logits
        assert output.past_key_values is None
        halved = model(tokens, labels=labels, num_items_in_batch=torch.tensor(2 * counted)).loss
        assert halved.item() == pytest.approx(expected.item() / 2, rel=1e-6)


def test_trainer_reduces_the_loss(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = build("gss-hybrid")
    rows = [{"input_ids": [EOS, *range(number, number + 12)]} for number in range(8)]

    def collate(chosen: list[dict]) -> dict[str, torch.Tensor]:
        batch = left_padded([row["input_ids"][: 13 - index] for index, row in enumerate(chosen)])
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=15,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        save_strategy="steps",
        save_steps=15,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = transformers.Trainer(
        model=model, args=settings, train_dataset=rows, eval_dataset=rows, data_collator=collate
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.5
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[0] == pytest.approx(before, rel=0.05)  # accumulated pieces are divided once
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trainer" / "checkpoint-15")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))


def test_a_grown_vocabulary(tmp_path: Path) -> None:
    config = small_config("gss", embedding_std=0.02)
    model = hf.GSSForCausalLM(hf.GSSConfig.of(config, eos_token_id=EOS)).eval()
    before = model.model.embedding.weight.clone()
    for size, options in ((64, {}), (70, {"mean_resizing": False})):
        model.resize_token_embeddings(size, **options)
        assert model.config.vocab_size == model.model.config.vocab_size == size
    assert torch.equal(model.model.embedding.weight[:61], before)
    assert model.model.embedding.weight[64:].std() < 0.04  # as the others are: logits are their products
    assert model(torch.tensor([[69]])).logits.shape == (1, 1, 70)
    model.save_pretrained(tmp_path)
    assert hf.GSSForCausalLM.from_pretrained(tmp_path).config.vocab_size == 70


@pytest.mark.parametrize(
    ("message", "inputs"),
    [
        ("has holes", {"attention_mask": torch.tensor([[1, 0, 1]])}),
        ("must be \\[batch, length\\] like", {"attention_mask": torch.ones(1, 1, 3, 3)}),
        ("inputs_embeds is not supported", {"inputs_embeds": torch.zeros(1, 3, 16)}),
        ("position_ids is not supported", {"position_ids": torch.arange(3)[None]}),
        ("output_hidden_states is not supported", {"output_hidden_states": True}),
        ("outside the vocabulary", {"input_ids": torch.tensor([[61]])}),
        ("tokens are empty", {"input_ids": torch.zeros(1, 0, dtype=torch.int64)}),
        ("there are no input_ids", {"input_ids": None}),
        ("is a DynamicCache", {"past_key_values": transformers.DynamicCache()}),
    ],
)
def test_bad_input(message: str, inputs: dict) -> None:
    with pytest.raises(ValueError, match=message):
        build("gss")(**{"input_ids": torch.tensor([[1, 2, 3]]), **inputs})


def test_bad_generation(tmp_path: Path) -> None:
    model, ids = build("gss"), torch.tensor([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(ValueError, match="pad on the left"):
        model.generate(ids, attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]), max_new_tokens=2)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2)
    with pytest.raises(ValueError, match="assisted"):
        model.generate(ids[:1], assistant_model=build("gss"), max_new_tokens=2)
    with pytest.raises(ValueError, match="no field"):
        hf.GSSConfig(model={"layers": 3})
    model.save_pretrained(tmp_path)
    weights = model.state_dict()
    del weights["model.layers.1.gate.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match="no weights for a Linear"):
        hf.GSSForCausalLM.from_pretrained(tmp_path)
