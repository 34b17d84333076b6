"""roundpipe: train models larger than the memory of the accelerators at hand."""
