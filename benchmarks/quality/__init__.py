"""Right results, on every architecture and processor, and tests that notice wrong ones."""
