"""The paper's tables on your own corpora: systems and their settings, trained and scored one after another.

settings (what is compared, as data) -> trials (what is run) -> runner (train, score, keep) -> tables
"""

from gss.reproduce.runner import Outcome, reproduce
from gss.reproduce.settings import SCALES, SYSTEMS, TARGETS, Scale, System, Target
from gss.reproduce.trials import Corpus, Trial, find_corpora, planned

__all__ = ["SCALES", "SYSTEMS", "TARGETS", "Corpus", "Outcome", "Scale", "System", "Target", "Trial"]
__all__ += ["find_corpora", "planned", "reproduce"]
