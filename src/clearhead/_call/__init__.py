"""What an attention call is: its spec, its operands, heads, dropout, and its observers."""
