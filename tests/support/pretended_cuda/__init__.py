"""A CUDA device without one: see `mode.PretendedDevice`. It is loaded in processes of its own; see `plugin`."""
