"""The layers of an encoder in one loop, without the modules' own code, for inference on the CPU."""
