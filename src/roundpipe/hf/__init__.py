"""Models of transformers as sequences of layers; the only package that imports transformers."""

from roundpipe.hf.cut import CutModel, cut_model, is_cuttable
from roundpipe.hf.load import load_model, load_tokenizer, reading_once
from roundpipe.hf.pipe import HuggingFacePipe
from roundpipe.hf.random_init import init_random
from roundpipe.hf.refusal import CutRefusedError

__all__ = [
    "CutModel",
    "CutRefusedError",
    "HuggingFacePipe",
    "cut_model",
    "init_random",
    "is_cuttable",
    "load_model",
    "load_tokenizer",
    "reading_once",
]
