"""Models of transformers as sequences of layers; the only package that imports transformers."""

from roundpipe.hf.cut import CutModel, cut_model, is_cuttable
from roundpipe.hf.load import load_model, load_tokenizer
from roundpipe.hf.pipe import HuggingFacePipe
from roundpipe.hf.refusal import CutRefusedError

__all__ = [
    "CutModel",
    "CutRefusedError",
    "HuggingFacePipe",
    "cut_model",
    "is_cuttable",
    "load_model",
    "load_tokenizer",
]
