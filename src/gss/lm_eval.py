"""The model type "gss" for EleutherAI's lm-eval, registered when this module is imported.

    python -m gss.lm_eval run --model gss --model_args run=runs/books --tasks lambada_openai,wikitext

or from Python `lm_eval.simple_evaluate(model="gss", model_args={"run": "runs/books"}, tasks=[…])`. Texts of any length
are scored whole, in pieces with the state carried, without truncation or a sliding window. The end-of-document id comes
before every text, as in training.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gss.data import Tokenizer
from gss.generate import generate
from gss.lm import load
from gss.model import LanguageModel
from gss.sampling import OPTIONS, Sampling
from gss.scoring import PIECE, score_sequences

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from tqdm import tqdm
except ImportError as error:
    if __name__ == "__main__":
        raise SystemExit("error: gss.lm_eval needs lm-eval: pip install 'gss-lm[eval]'") from None
    raise ImportError("gss.lm_eval needs lm-eval: pip install 'gss-lm[eval]'") from error


@register_model("gss")
class GSSLM(TemplateLM):
    """A run, or a model with its tokenizer.

    run, step     a run folder, and the step of the checkpoint (None: the newest intact one)
    model         instead of a run, together with `tokenizer`
    batch_size    texts scored side by side
    piece         tokens of each text that are read at a time, which bounds memory
    """

    def __init__(
        self,
        run: str | Path | None = None,
        *,
        step: int | None = None,
        model: LanguageModel | None = None,
        tokenizer: Tokenizer | None = None,
        batch_size: int | str = 16,
        max_batch_size: int | None = None,
        device: str | torch.device | None = None,
        piece: int = PIECE,
        max_gen_toks: int = 256,
    ) -> None:
        super().__init__()
        if run is not None and model is None and tokenizer is None:
            # lm-eval's command passes cuda:0 whether there is a GPU or not.
            named = device if device is not None and torch.cuda.is_available() else "cpu"
            model, tokenizer, *_ = load(run, step=step, device=named)
        elif run is not None or model is None or tokenizer is None:
            raise ValueError("give either a run folder (run=runs/books) or both a model and its tokenizer")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1, not {batch_size!r}")
        if piece < 1:
            raise ValueError(f"piece must be at least 1, not {piece}")
        self.model, self.vocabulary = model.eval(), tokenizer
        self.batch_size, self.piece, self.max_gen_toks = int(batch_size), piece, max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The end-of-document id, which documents also begin with."""
        return self.vocabulary.eos_id

    @property
    def tokenizer_name(self) -> str:
        """Identifies the vocabulary in lm-eval's cache of requests."""
        return f"gss-{self.vocabulary.hash[:16]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, preceded by the end-of-document id unless `add_special_tokens` is False."""
        first = [] if add_special_tokens is False else [self.eot_token_id]
        return [*first, *self.vocabulary.encode(string).tolist()]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        rows = [(context + continuation, len(context)) for _, context, continuation in requests]
        scores = self._scores(rows, disable_tqdm)
        for (texts, *_), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text."""
        rows = [(self.tok_encode(request.args[0]), 1) for request in requests]
        scores = [score for score, _ in self._scores(rows, disable_tqdm)]
        for request, score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, score)
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """A continuation of each context up to a stop string; greedy unless the task asks for sampling."""
        texts = []
        for request in tqdm(requests, desc="generating", disable=disable_tqdm):
            context, options = request.args
            until = options.get("until") or []
            text = generate(
                self.model,
                self.vocabulary,
                context,
                max_tokens=int(options.get("max_gen_toks", self.max_gen_toks)),
                sampling=_sampling(options),
                stop=[mark for mark in ([until] if isinstance(until, str) else until) if mark],
                precision="fp32",  # as scores are
            )
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def _scores(self, rows: list[tuple[list[int], int]], quiet: bool) -> list[tuple[float, bool]]:
        """For each row, ids and the index of the first that counts: the log-probability of those, and whether each is
        the likeliest.

        Rows of similar length are scored side by side, the longest first.
        """
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row][0]))
        total, greedy = torch.zeros(len(rows), dtype=torch.float64), torch.ones(len(rows), dtype=torch.bool)
        for start in tqdm(range(0, len(order), self.batch_size), desc="scoring", disable=quiet):
            chosen = order[start : start + self.batch_size]
            ids, skipped = [rows[row][0] for row in chosen], [rows[row][1] - 1 for row in chosen]
            for part in score_sequences(self.model, ids, skip=skipped, piece=self.piece):
                live = chosen[: len(part.counted)]
                total[live] += part.log_probability.sum(1)
                greedy[live] &= part.likeliest.all(1)
        return list(zip(total.tolist(), greedy.tolist(), strict=True))


def _sampling(options: dict[str, Any]) -> Sampling:
    temperature = float(options.get("temperature", 1.0 if options.get("do_sample") else 0.0))
    if not options.get("do_sample", temperature > 0):
        return Sampling(temperature=0)
    others = {name: options[name] for name in OPTIONS if options.get(name)}
    return Sampling(**{**others, "temperature": temperature})


if __name__ == "__main__":
    cli_evaluate()
