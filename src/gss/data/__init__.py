"""From text to batches of token ids; knows nothing of models.

text -> sources -> readers -> tokenizer -> parts -> merge -> shards -> batches -> prefetch
"""

from gss.data.batches import Batch, Batches, Packed, Segments, as_tensors
from gss.data.lanes import Lanes
from gss.data.manifest import Manifest, read_manifest
from gss.data.prefetch import Prefetch
from gss.data.preparation import prepare
from gss.data.shards import Dataset, Document, dataset_from_arrays, open_dataset
from gss.data.sources import SourceOptions
from gss.data.tokenizer import Tokenizer, load_tokenizer, require_same

__all__ = [
    "Batch",
    "Batches",
    "Dataset",
    "Document",
    "Lanes",
    "Manifest",
    "Packed",
    "Prefetch",
    "Segments",
    "SourceOptions",
    "Tokenizer",
    "as_tensors",
    "dataset_from_arrays",
    "load_tokenizer",
    "open_dataset",
    "prepare",
    "read_manifest",
    "require_same",
]
