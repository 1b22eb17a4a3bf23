"""Bringing batches to where a model is: a host's memory (the reference), torch's devices, JAX's."""
