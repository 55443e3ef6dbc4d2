"""From a scheduled program to source text, packed weights and tables."""
