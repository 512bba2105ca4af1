"""These files are imported where PyTorch has the pretended device, and nowhere else: they hold no doctests."""

collect_ignore_glob = ["*.py"]
