"""What is done to a program: pure functions from graph to graph."""
