"""Where items come from: indexable data, iterables, files, live feeds, mixtures of pipelines."""
