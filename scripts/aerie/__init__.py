"""The library behind Aerie's scripts: one module a concept. It knows nothing of Snakemake."""
