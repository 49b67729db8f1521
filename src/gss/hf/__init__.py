"""The models in `transformers`: configuration, model, recurrent cache, tokenizers, export and import.

Importing this package registers the classes with `AutoConfig`, `AutoModelForCausalLM` and `AutoTokenizer`, so exported
folders load by path. Without the import, they load with `trust_remote_code=True`, through a file in the folder that
imports these classes.

>>> import gss.hf
>>> model = transformers.AutoModelForCausalLM.from_pretrained("exported")
"""

try:
    import transformers
except ImportError as error:
    raise ImportError("gss.hf needs transformers: pip install 'gss-lm[hf]'") from error

from gss.hf.config import GSSConfig
from gss.hf.exchange import export_run, import_folder
from gss.hf.model import GSSForCausalLM, StateCache
from gss.hf.tokenizer import GSSSentencePieceTokenizer, convert_tokenizer

__all__ = [
    "GSSConfig",
    "GSSForCausalLM",
    "GSSSentencePieceTokenizer",
    "StateCache",
    "convert_tokenizer",
    "export_run",
    "import_folder",
]

transformers.AutoConfig.register(GSSConfig.model_type, GSSConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(GSSConfig, GSSForCausalLM, exist_ok=True)
# The one class of ours; byte and tokenizer.json vocabularies are plain fast tokenizers, which their folders name.
transformers.AutoTokenizer.register(GSSConfig, slow_tokenizer_class=GSSSentencePieceTokenizer, exist_ok=True)
