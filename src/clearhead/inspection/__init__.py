"""Looking inside: the steps of one call, and the health of the kernels on this machine.

Nothing is imported here: ``clearhead.walkthrough`` is the public name, and ``clearhead doctor`` the command.
"""

__all__: list[str] = []
