"""What an attention call is: its request, spec and operands, their checks, heads, dropout, and its observers."""
