"""What a decode program *is*: graph, op table, verifier, interpreter, and the plans derived from it."""
