"""``python -m clearhead``: the same as the command ``clearhead``."""

from clearhead_command import main

main()
