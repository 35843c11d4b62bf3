"""A search over a case: single methods, then pairs of what helped, then what is worth keeping."""
