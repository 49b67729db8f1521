"""From text to batches of token ids. Independent of models.

text -> sources -> formats -> chunks -> tokenizer -> parts -> merging -> shards -> batches
"""

from gss.data.batches import Batch, Batches, Lanes, Lengthened, Packed, Prefetch, Segments, as_tensors
from gss.data.preparation import merge_shares, prepare, usable_cores
from gss.data.shards import Dataset, Document, Manifest, open_dataset, read_manifest
from gss.data.sources import SourceOptions
from gss.data.tokenizer import Tokenizer, load_tokenizer, require_same

__all__ = [
    "Batch",
    "Batches",
    "Dataset",
    "Document",
    "Lanes",
    "Lengthened",
    "Manifest",
    "Packed",
    "Prefetch",
    "Segments",
    "SourceOptions",
    "Tokenizer",
    "as_tensors",
    "load_tokenizer",
    "merge_shares",
    "open_dataset",
    "prepare",
    "read_manifest",
    "require_same",
    "usable_cores",
]
