"""The corpora of the tests of `gss reproduce`."""

from tests.reproduce.conftest import _one_thread, corpus, texts

__all__ = ["_one_thread", "corpus", "texts"]
