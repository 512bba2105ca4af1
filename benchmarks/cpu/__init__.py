"""Speed and memory of attention on a CPU."""
