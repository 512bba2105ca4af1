"""Clearhead inside other libraries; each module needs the library it is named after."""

__all__: list[str] = []
