"""What the operator decides: pure functions from what was observed to what is to be done. Nothing here does any I/O."""
