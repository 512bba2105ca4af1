"""Attention calls: request, spec, operands and their checks; heads, dropout and observers."""
