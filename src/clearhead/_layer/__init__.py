"""From a module to a kernel: project, unpad, attend, pad, project out."""
