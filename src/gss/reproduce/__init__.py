"""The paper's tables on corpora at hand: which systems, at which settings, trained and scored run by run.

settings (what is compared, as data) -> plan (runs) -> runner (train, score, keep) -> tables, plots
"""

from gss.reproduce.plan import Corpus, find_corpora, planned
from gss.reproduce.runner import Outcome, reproduce
from gss.reproduce.settings import SCALES, TARGETS

__all__ = ["SCALES", "TARGETS", "Corpus", "Outcome", "find_corpora", "planned", "reproduce"]
