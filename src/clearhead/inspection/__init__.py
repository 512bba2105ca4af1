"""Looking inside: records, interventions, and the steps of one call.

Nothing is imported here: the public names are in ``clearhead``.
"""

__all__: list[str] = []
