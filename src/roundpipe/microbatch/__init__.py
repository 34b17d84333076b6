"""Splitting argument trees into microbatches and merging outputs."""
