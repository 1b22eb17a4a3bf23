"""One stream for several readers in one process, each of which has a part of it."""
