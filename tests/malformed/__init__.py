"""Generated malformed calls of every public function, constructor and method."""
