"""Measurements side by side, each a command.

A folder is a subject: `cpu`, `gpu`, `encoders`, `seeing` and `quality`. ``python -m benchmarks.cpu`` runs the main
command of a folder, where it has one, and ``python -m benchmarks.cpu.decoding`` a file of it. `all` runs them all,
`figures` fills the pages; the other files of this folder are shared. Result files lie in `results`, named after the
file of the command.
"""
