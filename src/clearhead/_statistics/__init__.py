"""Statistics of attention weights: what they are, how they are computed block by block, and what comes back."""
