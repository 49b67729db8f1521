"""Evaluation during training: the loss on the validation split, and a sample of text.

Under FSDP2 every process must call these functions, since each holds a shard of the model.
"""

from gss.data import Dataset, open_dataset
from gss.evaluation import evaluate, longest_document
from gss.generate import Sampling, generate
from gss.model import LanguageModel
from gss.training.config import TrainConfig

VALIDATION = "valid"
_SAMPLING = Sampling(temperature=0.8)


def open_validation(training: Dataset) -> Dataset | None:
    """The validation split beside a training split, if there is one."""
    if training.folder is None or training.manifest is None or VALIDATION not in training.manifest.splits:
        return None
    return open_dataset(training.folder, VALIDATION, verify=False)


def validation_losses(
    model: LanguageModel, validation: Dataset, config: TrainConfig, precision: str
) -> dict[int, float]:
    """Nats per token at each configured length; lengths beyond the longest document are reduced to it."""
    report = config.report
    longest = longest_document(validation, report.evaluate_tokens)
    lengths = sorted({min(length, longest) for length in report.evaluate_lengths or (config.length,)})
    result = evaluate(model, validation, lengths, max_tokens=report.evaluate_tokens, precision=precision)
    return {row.length: row.loss for row in result.rows if row.length is not None}


def sample(model: LanguageModel, training: Dataset, config: TrainConfig) -> str:
    """The prompt and its continuation, generated without dropout."""
    report = config.report
    learning = model.training
    model.eval()
    try:
        text = generate(
            model,
            training.tokenizer(),
            report.sample_prompt,
            max_tokens=report.sample_tokens,
            sampling=_SAMPLING,
            seed=config.seed,
            precision="fp32",
        )
    finally:
        model.train(learning)
    return report.sample_prompt + text
