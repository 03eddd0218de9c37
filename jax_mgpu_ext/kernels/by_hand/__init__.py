"""The reference kernels, with JAX's own specs and barriers, by hand."""
