"""Training a drafter: data, packing, trainer."""
