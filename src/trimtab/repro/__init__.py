"""Reproducing what the stock stack does with a split base and an adapter, for a report."""
