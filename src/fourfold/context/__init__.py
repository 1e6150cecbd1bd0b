"""Sequences cut over the places of a context group: who holds which tokens, and how K and V travel."""
